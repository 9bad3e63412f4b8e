"""Hostile but legal inputs: what every contract asks, and what it promises."""

from __future__ import annotations

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
