"""Tests that a contract's samples detect incorrect forms of its op."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from vllm_fl.contracts import OpSpec, Sample
from vllm_fl.plugins.registry import known_contracts
from vllm_fl_verify.oracle import closed, wanted_of, worst

CPU = torch.device("cpu")
Form = Callable[..., Any]


def dtypes(spec: OpSpec) -> Iterable[Any]:
    """The dtypes of a contract as parameters; the default run has only bfloat16."""
    for name in spec.dtypes:
        is_slow = name.startswith("float") and "bfloat16" in spec.dtypes
        marks = [pytest.mark.slow] if is_slow else []
        yield pytest.param(getattr(torch, name), id=name, marks=marks)


def by_dtype(cases: Iterable[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Parametrise a test by (op, what, dtype), or (op, dtype), for each dtype of the op."""
    params = [
        pytest.param(
            *case, *dtype.values, marks=dtype.marks, id="-".join([*map(str, case), str(dtype.id)])
        )
        for case in cases
        for dtype in dtypes(known_contracts().contracts[case[0]])
    ]
    names = ("op", "what", "dtype") if len(params[0].values) == 3 else ("op", "dtype")
    return pytest.mark.parametrize(names, params)


per_case = pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        pytest.param(spec, *dtype.values, marks=dtype.marks, id=f"{spec.name}-{dtype.id}")
        for spec in known_contracts().contracts.values()
        for dtype in dtypes(spec)
    ],
)
"""Each contract in each of its dtypes."""


def problem(spec: OpSpec, form: Form, sample: Sample) -> str:
    """The problem of a form's results, rounded to the contract's dtypes, or ""."""
    shapes = spec.fake(*sample.args)
    many = isinstance(shapes, tuple)
    try:
        got = form(*sample.args)
    except (IndexError, RuntimeError):  # the incorrect read is impossible with this sample
        return ""
    pairs = zip(got, shapes, strict=True) if many else [(got, shapes)]
    results = tuple(None if mine is None else mine.to(like.dtype) for mine, like in pairs)
    return str(worst(closed(results if many else results[0], sample), wanted_of(spec, sample))[1])


def detects(
    forms: Iterable[tuple[str, str, Form]],
    is_fine: Callable[[str, str], bool] | None = None,
    without: str = "-",
) -> Callable[..., None]:
    """A test of incorrect forms: (op, the mistake, the form) of each. `is_fine`: whether only
    float32 detects a form, by op and mistake. `without`: prefix of the names of excluded
    samples."""
    known = {(op, what): form for op, what, form in forms}

    @by_dtype(known)
    def test(op: str, what: str, dtype: torch.dtype) -> None:
        if is_fine is not None and is_fine(op, what) and dtype is not torch.float32:
            pytest.skip("nearer to the op than a dtype of 16 bits is")
        spec = known_contracts().contracts[op]
        samples = [s for s in spec.samples(dtype, CPU) if not s.name.startswith(without)]
        assert any(problem(spec, known[op, what], sample) for sample in samples)

    return test
