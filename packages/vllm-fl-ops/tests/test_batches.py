"""What is wrong in batches as vLLM makes them only: each op's start sees it.

Each wrong kernel is its op's oracle with one fault in how it goes through the rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from oracle_mutants import oracle_impl

from vllm_fl.contracts import ModelSizes, OpSpec, contracts
from vllm_fl.engine.preflight import find_faults
from vllm_fl.engine.trials import Request, Role
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.types import BackendImplKind, OpImpl
from vllm_fl_ops.contracts.rules import typical_sizes

pytestmark = pytest.mark.slow

Kernel = Callable[..., Any]

LARGEST = 1100


def sizes_for(op: str) -> ModelSizes:
    """A small model's, with all that the op's binding asks."""
    more = typical_sizes([known_contracts().bindings[op]]).more
    return ModelSizes(64, 64, 2, 1, 64, 64, tokens=(1, LARGEST), max_position=4096, more=more)


def start_says(spec: OpSpec, kernel: Kernel, **options: Any) -> str | None:
    impl = OpImpl(spec.name, "vendor.acme", BackendImplKind.VENDOR, kernel, "acme", **options)
    dtype = getattr(torch, spec.dtypes[0])
    sizes = sizes_for(spec.name)
    found = find_faults(
        Request([Role(impl)], dtype, torch.device("cpu"), sizes, seed=1, seconds=-1.0)
    )
    assert not found.refused
    return found.faults[spec.name, "vendor.acme"][0] if found.faults else None


def each(result: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(result, tuple):
        return tuple(each(part, change) for part in result)
    return None if result is None else change(result).contiguous()


def count_of(spec: OpSpec, args: Iterable[Any]) -> int:
    return next(map(len, spec.with_rows(args).values()))


def wraps(spec: OpSpec, right: Kernel) -> Kernel:
    """Its grid has 512 places for rows, and begins anew."""

    def kernel(*args: Any) -> Any:
        rows = torch.arange(count_of(spec, args)) % 512
        return each(right(*args), lambda part: part[rows])

    return kernel


def leaves_equals_out(spec: OpSpec, right: Kernel) -> Kernel:
    """It takes a row that equals the one before for computed already, and leaves out to compute it:
    what stands there is another row's."""

    def kernel(*args: Any) -> Any:
        count = count_of(spec, args)
        same = torch.ones(max(0, count - 1), dtype=torch.bool)
        for rows in spec.with_rows(args).values():
            same &= (rows[1:] == rows[:-1]).unsqueeze(-1).flatten(1).all(1)
        taken = torch.arange(count)
        taken[1:][same] = 0
        return each(right(*args), lambda part: part[taken])

    return kernel


def keeps_the_last_row(spec: OpSpec, right: Kernel) -> Kernel:
    """Where a request has ended, it leaves the last row of its buffer as it was."""
    before: list[Any] = []

    def kernel(*args: Any) -> Any:
        count, result = count_of(spec, args), right(*args)
        parts = result if isinstance(result, tuple) else (result,)
        if before and count and before[0] == count + 1 and len(before[1]) == len(parts):
            for part, old in zip(parts, before[1], strict=True):
                if part is not None and old is not None and part.shape[1:] == old.shape[1:]:
                    part[-1] = old[count - 1]
        before[:] = [count, [None if part is None else part.clone() for part in parts]]
        return result

    return kernel


def keeps_weights(spec: OpSpec, right: Kernel) -> Kernel:
    """Of large batches it prepares weights once, and knows them by their address and version."""
    kept: dict[Any, torch.Tensor] = {}

    def kernel(*args: Any) -> Any:
        given = [
            kept.setdefault((name, arg.data_ptr(), arg.shape, arg._version), arg.clone())
            if isinstance(arg, torch.Tensor)
            and name not in spec.by_token
            and count_of(spec, args) > 300  # the contract's samples have no more
            else arg
            for name, arg in zip(spec.parameters, args, strict=True)
        ]
        return right(*given)

    return kernel


def runs_from_the_first(spec: OpSpec, right: Kernel) -> Kernel:
    """It takes all positions for one run where the second follows the first."""
    at = spec.parameters.index("position_ids")

    def kernel(*args: Any) -> Any:
        positions = args[at]  # of a token, or three of it
        if len(positions) > 1 and bool((positions[1] == positions[0] + 1).all()):
            steps = torch.arange(len(positions), device=positions.device)
            run = positions[0] + steps.view(-1, *[1] * (positions.ndim - 1))
            args = (*args[:at], (run % 4096).to(positions.dtype), *args[at + 1 :])
        return right(*args)

    return kernel


WITH_WEIGHTS = (
    "rms_norm",
    "layer_norm",
    "rms_norm_gated",
    "linear",
    "linear_fp8",
    "linear_gelu_tanh_and_mul",
    "linear_silu_and_mul",
)

OF_ROWS = [spec for spec in contracts().values() if not spec.whole_batch]
WITH_POSITIONS = [spec for spec in OF_ROWS if "position_ids" in spec.by_token]


@pytest.mark.parametrize("wrong", [wraps, leaves_equals_out, keeps_the_last_row])
@pytest.mark.parametrize("spec", OF_ROWS, ids=lambda spec: spec.name)
def test_rows(spec: OpSpec, wrong: Callable[[OpSpec, Kernel], Kernel]) -> None:
    right = oracle_impl(spec)
    assert "it is wrong" in str(start_says(spec, wrong(spec, right.fn)))


@pytest.mark.parametrize("op", WITH_WEIGHTS)
def test_weights(op: str) -> None:
    spec = contracts()[op]
    assert "large values" in str(start_says(spec, keeps_weights(spec, oracle_impl(spec).fn)))


@pytest.mark.parametrize("spec", WITH_POSITIONS, ids=lambda spec: spec.name)
def test_positions(spec: OpSpec) -> None:
    assert "it is wrong" in str(start_says(spec, runs_from_the_first(spec, oracle_impl(spec).fn)))


@pytest.mark.parametrize("spec", contracts().values(), ids=lambda spec: spec.name)
def test_the_right_one_passes(spec: OpSpec) -> None:
    assert start_says(spec, oracle_impl(spec).fn) is None
