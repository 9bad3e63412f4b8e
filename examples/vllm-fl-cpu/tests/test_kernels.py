"""Tests beyond the conformance kit: supported calls, and calls that these kernels get wrong or that
crash the process."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from anywhere import registered

import vllm_fl_cpu.impl as shared
from vllm_fl.contracts import Sample
from vllm_fl.plugins.registry import known_contracts
from vllm_fl_cpu.plugin import register_ops
from vllm_fl_verify.verification import compare

IMPLS = registered(register_ops())
CPU = torch.device("cpu")
DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
ROUNDED = {"gelu_and_mul", "gelu_fast", "gelu_new", "quick_gelu", "rms_norm", "silu_and_mul"}
"""Ops that pass float32 to kernels that truncate bfloat16."""

CUTS_OFF = shared.cuts_off(torch.bfloat16)


@pytest.fixture(
    params=[
        pytest.param(dtype, id=name, marks=[pytest.mark.slow] * (name != "bf16"))
        for dtype, name in DTYPES.items()
    ]
)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(autouse=True)
def _as_where_kernels_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assume kernels that round on all processors: others differ only in the last bit."""
    monkeypatch.setattr(shared, "_cuts_bfloat16_off", lambda: False)


def bias(op: str) -> float:
    """The median bias over the contract's bfloat16 samples, all of them correct; 0 if unknown."""
    spec = known_contracts().contracts[op]
    samples = spec.samples(torch.bfloat16, CPU)
    compared = [compare(IMPLS[op], spec, sample, torch.bfloat16) for sample in samples]
    assert {each.status for each in compared} <= {"ok", "refused"}
    return statistics.median([bias for each in compared for bias in each.biases.values()] or [0.0])


@pytest.mark.parametrize("op", sorted(ROUNDED))
def test_one_number_tells_which_processors_kernels_do_not_round(op: str) -> None:
    assert (bias(op) < -0.25) == CUTS_OFF


@pytest.mark.parametrize("op", sorted(ROUNDED))
def test_results_are_rounded_where_the_kernels_do_not(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_cuts_bfloat16_off", lambda: True)
    assert abs(bias(op)) < 0.05


def test_experts_that_are_not_rounded_are_refused(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_cuts_bfloat16_off", lambda: True)
    sample = next(known_contracts().contracts["fused_experts"].samples(dtype, CPU))
    verdict = IMPLS["fused_experts"].supports(*sample.args)
    if dtype == torch.bfloat16:
        assert "truncates torch.bfloat16" in verdict
    else:
        assert verdict is True


def test_kernels_work_in_place_where_they_can(dtype: torch.dtype) -> None:
    x, residual = torch.randn(4, 64).to(dtype), torch.randn(4, 64).to(dtype)
    normed, total = IMPLS["rms_norm"].fn(x, residual, None, 1e-6)
    assert normed is x and total is residual
    query = torch.randn(4, 3 * 64).to(dtype)[:, :128].view(4, 2, 64)
    cos, sin = torch.randn(8, 64).to(dtype).chunk(2, dim=-1)
    turned, none = IMPLS["rotary_embedding"].fn(query, None, cos, sin, torch.arange(4))
    assert turned is query and none is None


REFUSED = [
    ("silu_and_mul", lambda d: (torch.zeros(2, 24, dtype=d),), "d % 8"),
    ("silu_and_mul", lambda d: (torch.zeros(2, 32, dtype=d, device="meta"),), "x.is_cpu"),
    ("gelu_new", lambda d: (torch.zeros(2, 12, dtype=d),), "x.shape[-1] % 8"),
    ("gelu_fast", lambda d: (torch.zeros(2, 12, dtype=d),), "x.shape[-1] % 8"),
    ("quick_gelu", lambda d: (torch.zeros((), dtype=d),), "x.ndim > 0"),
    ("rms_norm", lambda d: (torch.zeros(2, 12, dtype=d), None, None, 1e-6), "hidden % 8"),
]


@pytest.mark.parametrize(("op", "args", "reason"), REFUSED)
def test_what_the_kernels_cannot_do_is_refused(
    op: str, args: Any, reason: str, dtype: torch.dtype
) -> None:
    assert reason in str(IMPLS[op].supports(*args(dtype)))


def test_pairs_that_would_end_the_process_are_refused() -> None:
    for head_size, rotary in ((80, 24), (12, 8)):
        query = torch.zeros(2, 1, head_size).bfloat16()
        cos, sin = torch.zeros(4, rotary).bfloat16().chunk(2, dim=-1)
        verdict = IMPLS["rotary_embedding"].supports(query, None, cos, sin, torch.arange(2))
        assert "half % 8" in verdict


def _layouts(*shape: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """One tensor per layout that the kernels process incorrectly or crash on."""
    size = torch.Size(shape).numel()
    return {
        "unaligned": torch.randn(size + 1).to(dtype)[1:].view(shape),
        "unaligned rows": torch.randn(shape[0], size // shape[0] + 1).to(dtype)[:, 1:].view(shape),
        "slice of each head": torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)[..., shape[-1] :],
        "expanded": torch.randn(shape[1:]).to(dtype).expand(shape),
    }


@pytest.mark.parametrize("layout", sorted(_layouts(2, 1, 16, dtype=torch.float32)))
def test_any_layout_is_right(layout: str, dtype: torch.dtype) -> None:
    def draw(*shape: int) -> torch.Tensor:
        return _layouts(*shape, dtype=dtype)[layout]

    cos, sin = (table.to(dtype) for table in (torch.rand(16, 32), torch.rand(16, 32)))
    cos, sin = torch.cat((cos, sin), dim=-1).chunk(2, dim=-1)
    calls: dict[str, tuple[Any, ...]] = {
        "silu_and_mul": (draw(3, 64),),
        "gelu_and_mul": (draw(3, 64), "tanh"),
        "gelu_new": (draw(3, 64),),
        "gelu_fast": (draw(3, 64),),
        "quick_gelu": (draw(3, 64),),
        "rms_norm": (draw(3, 64), draw(3, 64), None, 1e-6, None),
        "rotary_embedding": (draw(3, 4, 64), draw(3, 2, 64), cos, sin, torch.tensor([5, 0, 9])),
    }
    for op, args in calls.items():
        spec = known_contracts().contracts[op]
        full = (*args, *(p.default for p in list(spec.signature.parameters.values())[len(args) :]))
        result = compare(IMPLS[op], spec, Sample(layout, full), dtype)
        assert result.status == "ok", f"{op}: {result.reason}"
