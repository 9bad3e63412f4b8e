"""Hostile but legal inputs: what every contract asks, and what it promises."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from vllm_fl.contracts import OpSpec, Sample, contracts
from vllm_fl.engine.verification import compare
from vllm_fl.plugins.types import BackendImplKind, OpImpl

CPU = torch.device("cpu")
INTEGERS = {"moe_align_block_size"}

per_spec = pytest.mark.parametrize("spec", contracts().values(), ids=lambda spec: spec.name)


def activations(spec: OpSpec, sample: Sample) -> list[torch.Tensor]:
    return list(spec.with_rows(sample.args).values())


@per_spec
def test_every_contract_asks_for_nan_beside_rows_without(spec: OpSpec) -> None:
    if spec.name in INTEGERS:
        return
    for name in spec.dtypes:
        samples = list(spec.samples(getattr(torch, name), CPU))
        broken = [
            sample
            for sample in samples
            for x in activations(spec, sample)
            if x.isnan().any() and not x.isnan().flatten(1).any(1).all()
        ]
        assert broken, f"{name}: no sample has NaN in a row, and none in another"
        for sample in broken:
            rows = len(activations(spec, sample)[0])
            assert len(sample.open_rows) < rows, f"{sample.name}: nothing is compared"


@per_spec
def test_every_contract_asks_for_no_tokens(spec: OpSpec) -> None:
    samples = spec.samples(getattr(torch, spec.dtypes[-1]), CPU)
    assert any(not len(x) for sample in samples for x in activations(spec, sample))


@per_spec
def test_a_result_of_open_rows_may_be_anything_and_no_other(spec: OpSpec) -> None:
    dtype = getattr(torch, spec.dtypes[-1])
    for sample in spec.samples(dtype, CPU):
        rows = len(activations(spec, sample)[0])
        for spoilt in sample.open_rows and range(rows):
            result = compare(_spoiling(spec, spoilt), spec, sample, dtype)
            wanted = "ok" if spoilt in sample.open_rows else "wrong"
            assert result.status == wanted, (sample.name, spoilt, result.reason)


def _spoiling(spec: OpSpec, row: int) -> OpImpl:
    """The oracle, rounded, with one row that is off."""

    def fn(*args: Any) -> Any:
        exact, shapes = spec.oracle(*args), spec.fake(*args)
        if not isinstance(exact, tuple):
            return _spoilt(exact.to(shapes.dtype), row)
        if shapes[0].dtype in (torch.int8, torch.float8_e4m3fn):
            whole = (
                exact[1]
                if exact[1].ndim < 2
                else exact[1].repeat_interleave(exact[0].shape[1] // exact[1].shape[1], 1)
            )
            most = 127.0 if shapes[0].dtype == torch.int8 else 448.0
            value = (exact[0] / whole).nan_to_num(0.0, 0.0, 0.0)
            exact = (value.round().clamp(-most, most) if most < 200 else value, *exact[1:])
        results = [part.to(shape.dtype) for part, shape in zip(exact, shapes, strict=True)]
        return (_spoilt(results[0], row), *results[1:])

    return OpImpl(spec.name, "vendor.acme", BackendImplKind.VENDOR, fn, "acme")


def _spoilt(result: torch.Tensor, row: int) -> torch.Tensor:
    result = result.clone()
    result[row] = (result[row].float().nan_to_num(0.0, 0.0, 0.0) * -0.5 + 9.0).to(result.dtype)
    return result


def test_an_id_of_no_expert_adds_nothing_with_and_without_a_map() -> None:
    spec = contracts()["fused_experts"]
    torch.manual_seed(0)
    x, w13, w2 = torch.randn(3, 8), torch.randn(4, 8, 8), torch.randn(4, 8, 4)
    weights = torch.full((3, 2), 0.5)
    ids = torch.tensor([[0, 3], [-1, -1], [3, -1]], dtype=torch.int32)
    for here in (None, torch.tensor([1, -1, -1, 3], dtype=torch.int32)):
        rest = "silu", False, -1 if here is None else 4, here, None, None
        for form in (spec.oracle, spec.second_form):
            assert form is not None
            out = form(x, w13, w2, weights, ids, *rest)
            assert not out[1].any() and out[0].any()
            alone = form(x[2:], w13, w2, weights[2:, :1], ids[2:, :1], *rest)
            assert torch.allclose(out[2:], alone)
            spoilt = weights.masked_fill(ids < 0, math.nan)
            assert torch.equal(form(x, w13, w2, spoilt, ids, *rest), out)
        assert spec.check(x, w13, w2, weights, ids, *rest) is None
        beyond = spec.check(x, w13, w2, weights, ids + 1, *rest)
        assert beyond == ("topk_ids", "must be below the number of experts, 4, got 4")


@pytest.mark.parametrize("infinity", [-math.inf, math.inf])
@pytest.mark.parametrize("unwritten", [math.nan, math.inf])
def test_a_side_without_keys_adds_nothing_whatever_it_holds(
    infinity: float, unwritten: float
) -> None:
    spec = contracts()["merge_attn_states"]
    nothing = torch.full((1, 1, 4), unwritten), torch.full((1, 1), infinity)
    ones = torch.ones(1, 1, 4), torch.zeros(1, 1)
    for form in (spec.oracle, spec.second_form):
        for args in ((*nothing, *ones), (*ones, *nothing)):
            assert form is not None
            output, lse = form(*args)
            assert torch.equal(output, ones[0].double()) and not lse.any()
