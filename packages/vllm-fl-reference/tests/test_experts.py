"""Experts in a CUDA graph, which cannot count tokens: equal numbers by another method."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from vllm_fl.plugins.registry import known_contracts
from vllm_fl_reference.impl import experts
from vllm_fl_verify.verification import compare

SPEC = known_contracts().contracts["fused_experts"]
(IMPL,) = experts.OPS


def uncounted(*args: Any, **options: Any) -> Any:
    raise AssertionError("the host waits for a count")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_a_graph_every_expert_computes_all_tokens(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    @functools.wraps(IMPL.fn)
    def captured(*args: Any) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "nonzero", uncounted)
            patched.setattr(experts, "_is_captured", lambda x: True)
            return experts.fused_experts(*args)

    samples = list(SPEC.samples(dtype, torch.device("cpu")))
    assert samples
    for sample in samples:
        found = compare(dataclasses.replace(IMPL, fn=captured), SPEC, sample, dtype)
        assert found.status == "ok", f"{sample.name}: {found.reason}"


def test_on_a_cpu_the_tokens_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = next(iter(SPEC.samples(torch.float32, torch.device("cpu"))))
    monkeypatch.setattr(torch.Tensor, "nonzero", uncounted)
    with pytest.raises(AssertionError, match="waits for a count"):
        experts.fused_experts(*sample.args)
