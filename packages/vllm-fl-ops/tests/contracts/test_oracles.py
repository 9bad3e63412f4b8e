"""The oracles against an independent form of the same op, in fp64."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from telling import per_case

from vllm_fl.contracts import OpSpec, contracts
from vllm_fl.engine.wanted import closed, parts

CPU = torch.device("cpu")
EXACT = {"rtol": 1e-10, "atol": 1e-12, "equal_nan": True}

per_spec = pytest.mark.parametrize("spec", contracts().values(), ids=lambda spec: spec.name)


def disagreements(spec: OpSpec, dtype: torch.dtype) -> list[str]:
    """The samples on which the two forms differ, in results or in their number."""
    second = spec.second_form
    assert second is not None, f"{spec.name} has no second form to compare its oracle with"
    assert second.__code__ is not spec.oracle.__code__
    found = []
    for sample in spec.samples(dtype, CPU):
        results = (closed(form(*sample.args), sample) for form in (spec.oracle, second))
        pairs = zip(*map(parts, results), strict=True)
        if not all(_same(one, other) for one, other in pairs):
            found.append(sample.name)
    return found


def _same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and torch.allclose(one, other, **EXACT)


@per_case
def test_the_oracle_is_its_second_form(spec: OpSpec, dtype: torch.dtype) -> None:
    assert disagreements(spec, dtype) == []


@per_spec
def test_an_oracle_that_is_off_by_a_millionth_is_seen(spec: OpSpec) -> None:
    @functools.wraps(spec.oracle)
    def off(*args: Any) -> Any:
        results = spec.oracle(*args)
        if not isinstance(results, tuple):
            return _off(results)
        return (*results[:-1], None if results[-1] is None else _off(results[-1]))

    dtype = getattr(torch, spec.dtypes[0])
    assert disagreements(dataclasses.replace(spec, oracle=off), dtype)


def _off(result: torch.Tensor) -> torch.Tensor:
    return result * (1 + 1e-6) if result.is_floating_point() else result + 1


def test_the_oracle_of_gelu_and_mul_knows_two_approximations() -> None:
    with pytest.raises(ValueError, match="sigmoid"):
        contracts()["gelu_and_mul"].oracle(torch.ones(2, 2), "sigmoid")


def test_the_oracle_of_rms_norm_is_pytorchs() -> None:
    spec = contracts()["rms_norm"]
    for sample in spec.samples(torch.float32, CPU):
        x, residual, weight, epsilon, variance_size = sample.args
        if variance_size is None:
            y = x.double() if residual is None else x.double() + residual.double()
            wide = None if weight is None else weight.double()
            got = parts(spec.oracle(*sample.args))[0]
            torch.testing.assert_close(got, F.rms_norm(y, y.shape[-1:], wide, epsilon), **EXACT)


@per_spec
def test_oracles_leave_their_inputs_alone_in_fp64_too(spec: OpSpec) -> None:
    for sample in spec.samples(torch.float64, CPU):
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in sample.args]
        for result in parts(spec.oracle(*sample.args)):
            if result is not None:
                result.fill_(7.0)
        for old, new in zip(before, sample.args, strict=True):
            if isinstance(old, torch.Tensor):
                torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)
