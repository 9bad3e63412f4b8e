"""Traced forms: tried before a graph has them, so that no graph is fixed to a number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import silu

from vllm_fl.contracts import ModelSizes
from vllm_fl.engine.facts import EngineFacts
from vllm_fl.engine.traced import refused
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.types import OpImpl
from vllm_fl.settings.loading import load_settings
from vllm_fl_verify.made_inputs import lowering
from vllm_fl_verify.preflight import find_faults
from vllm_fl_verify.traced import trial
from vllm_fl_verify.trials import Request, Role

SPEC = known_contracts().contracts["silu_and_mul"]
X = torch.randn(33, 8)


def right(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.nn.functional.silu(x[..., :half]) * x[..., half:]


def in_place(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return right(x / 2)


def by_len(x: torch.Tensor) -> torch.Tensor:
    return right(x.view(len(x), -1))


def by_branch(x: torch.Tensor) -> torch.Tensor:
    return right(x) if x.shape[0] < 64 else right(x).clone()


def by_value(x: torch.Tensor) -> torch.Tensor:
    return right(x) if float(x.sum()) else x


def of(traced: Callable[..., Any] | None, **fields: Any) -> OpImpl:
    return replace(silu("vendor.acme", 0.0), fn=right, traced=traced, **fields)


@pytest.mark.parametrize("traced", [right, in_place])
def test_one_that_serves_any_number_of_tokens_may_stand_in_a_graph(
    traced: Callable[..., Any],
) -> None:
    before = X.clone()
    assert trial(of(traced), SPEC, (X,)) == ""
    assert torch.equal(X, before)


@pytest.mark.parametrize(
    ("traced", "why"),
    [
        (by_len, "depends on the number of tokens, which a graph serves many of: Eq("),
        (by_branch, "< 64 (take shape[0] instead of len, and no branch on it)"),
        (by_value, "its traced form cannot be traced: "),
    ],
)
def test_one_that_does_not_is_told_why(traced: Callable[..., Any], why: str) -> None:
    assert why in trial(of(traced), SPEC, (X,))


def test_supports_is_asked_with_what_a_graph_has() -> None:
    assert refused(of(right), SPEC, (X,)) == ""
    assert refused(of(right, supports=lambda x: x.ndim == 2), SPEC, (X,)) == ""
    assert refused(of(right, supports=lambda x: "no such rank"), SPEC, (X,)) == "no such rank"

    def failing(x: torch.Tensor) -> bool:
        raise RuntimeError("no memory to look at")

    assert refused(of(right, supports=failing), SPEC, (X,)).startswith("its supports raised ")


@pytest.mark.parametrize(
    ("traced", "why"),
    [
        (right, None),
        (lambda x: right(x) + 1, "it is wrong: "),
        (by_len, "depends on the number of tokens"),
        (lambda x: right(x)[:1], "it is wrong: returned"),
    ],
    ids=["right", "wrong", "fixed", "of one row"],
)
def test_start_up_catches_a_wrong_one_where_graphs_may_have_it(traced: Any, why: Any) -> None:
    impl = of(traced)
    key = impl.op_name, impl.impl_id
    sizes = ModelSizes(hidden=16, intermediate=32, tokens=(1, 64))
    cpu = torch.device("cpu")
    assert not find_faults(Request([Role(impl)], torch.float32, cpu, sizes, calls=0)).objections, (
        "nothing has it there"
    )
    in_graphs = Request([Role(impl, in_graphs=True)], torch.float32, cpu, sizes, calls=0)
    faults = find_faults(in_graphs).objections
    if why is None:
        assert not faults
        return
    said = faults[key].reason
    assert why.split("returned")[0] in said and "(traced, 5 x " in said


def test_it_must_be_a_function() -> None:
    with pytest.raises(TypeError, match="traced must be callable"):
        of("kernel")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("backend", "device", "lowered"),
    [
        ("", "cpu", "inductor"),
        ("inductor", "cuda", "inductor"),
        ("inductor", "meta", "aot_eager"),
        ("eager", "cpu", "aot_eager"),
    ],
)
def test_a_form_is_lowered_as_the_engine_lowers_its_model(
    backend: str, device: str, lowered: str
) -> None:
    facts = EngineFacts(load_settings({}), "compiled", compile_backend=backend)
    assert lowering(facts, torch.device(device)) == lowered
