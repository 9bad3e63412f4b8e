"""Incorrect implementations derived from every contract: its oracle, with one mistake. No
op-specific code. The mistakes are those that any kernel can make: correct numbers at the wrong
index, in the wrong dtype, slightly inexact, or with an argument ignored or overwritten."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch

from vllm_fl.contracts import OpSpec, QuantisedPair
from vllm_fl.plugins.types import BackendImplKind, OpImpl
from vllm_fl_verify.expected import spread

__all__ = ["CHANGES", "oracle_impl", "oracle_mutants"]

Change = Callable[[torch.Tensor, OpSpec], torch.Tensor]


def oracle_impl(spec: OpSpec, change: Callable[..., Any] | None = None) -> OpImpl:
    """The oracle, with contiguous results in the dtypes of its fakes. `change` makes (results as a
    tuple, arguments) incorrect; None: correct."""

    @wraps(spec.oracle)
    def fn(*args: Any) -> Any:
        wanted, shaped = spec.oracle(*args), spec.fake(*args)
        several = isinstance(wanted, tuple)
        if several:
            wanted = _quantised(spec, wanted, shaped)
        pairs = zip(wanted, shaped, strict=True) if several else [(wanted, shaped)]
        results = tuple(
            None if one is None else one.to(like.dtype).contiguous() for one, like in pairs
        )
        if change is not None:
            results = change(results, args)
        return results if several else results[0]

    return OpImpl(spec.name, "vendor.acme", BackendImplKind.VENDOR, fn, "acme")


def _quantised(spec: OpSpec, wanted: tuple[Any, ...], shaped: tuple[Any, ...]) -> tuple[Any, ...]:
    """The oracle's results, but with quantised values and scales instead of dequantised ones."""
    results, at = list(wanted), 0
    for output in spec.outputs_of(len(results)):
        if isinstance(output, QuantisedPair):
            value = (results[at] / spread(results[at + 1], results[at].shape)).nan_to_num()
            whole = not shaped[at].dtype.is_floating_point
            results[at] = value.round() if whole else value
        at += output.results
    return tuple(results)


def oracle_mutants(spec: OpSpec) -> Iterator[tuple[str, OpImpl]]:
    """(the mistake, an implementation with it)."""
    for number in range(max(variant.returns for variant in spec.variants)):
        single = _is_one_number(spec, number)
        for what, change in CHANGES.items():
            if not (single and what in OF_SEVERAL):
                impl = oracle_impl(spec, _on_result(number, change, spec))
                yield f"{what}, result {number}", impl
    for parameter, sample in _tensors(spec).items():
        if sample.dtype is not torch.bool:
            at = spec.parameters.index(parameter)
            yield f"{parameter} overwritten", oracle_impl(spec, _overwriting(at))
    for at, parameter in enumerate(spec.signature.parameters.values()):
        if parameter.default is not inspect.Parameter.empty and _reads(spec, parameter.name):
            yield f"{parameter.name} ignored", _ignoring(spec, at, parameter.default)


def _reads(spec: OpSpec, parameter: str) -> bool:
    """Whether the oracle computes with a parameter, and does not only check it."""
    return any(
        step.argval == parameter and step.opname.startswith("LOAD")
        for step in dis.get_instructions(spec.oracle)
    )


def _scaled(result: torch.Tensor, spec: OpSpec) -> torch.Tensor:
    """Wrong by some tolerances, or by one if nothing is tolerated."""
    if not result.is_floating_point():
        return result + 1
    try:
        bound = spec.tolerance(result.dtype)
    except KeyError:  # its outputs have separate tolerances
        return (result.float() * 1.25).to(result.dtype)
    return (result.double() * (1 + 4 * bound.rtol) + 4 * bound.atol).to(result.dtype)


def _neighbours_swapped(result: torch.Tensor, spec: OpSpec) -> torch.Tensor:
    """In the last dimension with two or more elements: for one scale per token, the tokens."""
    dims = [dim for dim in range(result.ndim) if result.shape[dim] > 1]
    if not dims:
        return result
    order = torch.arange(result.shape[dims[-1]])
    order[:2] = order[:2].flip(0)
    return result.index_select(dims[-1], order)


def _without_last_row(result: torch.Tensor, spec: OpSpec) -> torch.Tensor:
    result[-1:] = 0
    return result


def _last_row_not_a_number(result: torch.Tensor, spec: OpSpec) -> torch.Tensor:
    result[-1:] = float("nan") if result.is_floating_point() else -1
    return result


CHANGES: dict[str, Change] = {
    "scaled": _scaled,
    "first two features swapped": _neighbours_swapped,
    "last row left as zeros": _without_last_row,
    "last row left unwritten": _last_row_not_a_number,
    "rows shifted by one": lambda result, spec: result.roll(1, 0),
    "another dtype": lambda result, spec: result.double(),
    "of another shape": lambda result, spec: result[None],
    "a column apart in memory": lambda result, spec: torch.stack((result, result), -1)[..., 0],
}
"""Mistakes of a result, for any op."""

OF_SEVERAL = {"first two features swapped", "rows shifted by one", "a column apart in memory"}
"""Mistakes that do not change a single number."""


def _is_one_number(spec: OpSpec, number: int) -> bool:
    """Whether a result always has at most one element."""
    dtype = getattr(torch, spec.dtypes[0])
    calls = [spec.fake(*sample.args) for sample in spec.samples(dtype, torch.device("cpu"))]
    results = [call if isinstance(call, tuple) else (call,) for call in calls]
    found = [parts[number] for parts in results if number < len(parts)]
    return all(part is None or part.numel() < 2 for part in found)


def _on_result(number: int, change: Change, spec: OpSpec) -> Callable[..., Any]:
    def changed(results: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            change(one, spec) if at == number and one is not None and one.numel() else one
            for at, one in enumerate(results)
        )

    return changed


def _overwriting(at: int) -> Callable[..., Any]:
    def changed(results: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
        if isinstance(args[at], torch.Tensor):
            wide = args[at].double()
            args[at].copy_(wide * 0.5 if args[at].is_floating_point() else wide + 1)
        return results

    return changed


def _ignoring(spec: OpSpec, at: int, default: object) -> OpImpl:
    right = oracle_impl(spec)

    @wraps(spec.oracle)
    def fn(*args: Any) -> Any:
        return right.fn(*args[:at], default, *args[at + 1 :])

    return OpImpl(spec.name, "vendor.acme", BackendImplKind.VENDOR, fn, "acme")


def _tensors(spec: OpSpec) -> dict[str, torch.Tensor]:
    """A tensor for each parameter that may be one."""
    found: dict[str, torch.Tensor] = {}
    for sample in spec.samples(getattr(torch, spec.dtypes[0]), torch.device("cpu")):
        for parameter, value in zip(spec.parameters, sample.args, strict=True):
            if isinstance(value, torch.Tensor):
                found.setdefault(parameter, value)
    return found
