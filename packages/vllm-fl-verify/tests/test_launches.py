"""Token counts with other kernel launches."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import silu
from of_acme import silu_and_mul

from vllm_fl.contracts import ModelSizes
from vllm_fl_verify import launches
from vllm_fl_verify.preflight import find_faults
from vllm_fl_verify.trials import Request, Role


def variant(tokens: int) -> launches.Launched:
    name = "small" if tokens < 37 else "one" if tokens < 700 else "many"
    return frozenset({(name, 0)})


def test_where_other_kernels_are_launched() -> None:
    def edges(smallest: int, largest: int) -> list[int]:
        return list(launches.launch_edges(variant, smallest, largest, lambda: True))

    assert edges(1, 2048) == [37, 700]
    assert edges(1, 699) == [37]
    assert edges(37, 2048) == [700]
    assert edges(1, 1) == []
    assert list(launches.launch_edges(variant, 1, 2048, lambda: False)) == []


def test_nothing_is_launched_on_a_cpu() -> None:
    called: list[int] = []
    cpu = torch.device("cpu")
    assert launches.launched(lambda: called.append(1), cpu) == frozenset()
    assert called == []


def test_triton_tells_what_it_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[Any] = []
    chain = SimpleNamespace(add=hooks.append, remove=hooks.remove)
    runtime = SimpleNamespace(launch_enter_hook=chain)
    monkeypatch.setitem(sys.modules, "triton.knobs", SimpleNamespace(runtime=runtime))

    def call() -> None:
        for hook in hooks:
            hook(SimpleNamespace(get=lambda: {"name": "norm_kernel", "function": 7}))

    found = launches.launched(call, torch.device("meta"))
    assert found == {("norm_kernel", 7)}
    assert hooks == []


def test_both_sides_of_an_edge_are_verified() -> None:
    """The kernel is incorrect only at the first size of its second variant."""
    sizes_seen = [0]

    def wrong(x: torch.Tensor) -> torch.Tensor:
        sizes_seen.append(len(x))
        return silu_and_mul(x) + (len(x) == 700)

    def kernels(call: Any, device: torch.device) -> launches.Launched:
        call()
        return variant(sizes_seen[-1])

    role, sizes = Role(silu("vendor.acme", fn=wrong)), ModelSizes(intermediate=64, tokens=(1, 2048))
    more: Any = {"seed": 3, "calls": 1e9, "launched": kernels}
    found = find_faults(Request([role], torch.float32, torch.device("cpu"), sizes, **more))
    assert "700 x" in found.objections["silu_and_mul", "vendor.acme"].reason
