"""Calls of the oracle for expected outputs, and comparison of results with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any, Literal

import torch

from vllm_fl.contracts import Exact, ExpertBlocks, OpSpec, QuantisedPair, Routing, Sample, Within
from vllm_fl.contracts.outputs import Output
from vllm_fl.text import quote

from .expected import (
    Blocks,
    Deviation,
    Expected,
    Near,
    Pair,
    Routed,
    Same,
    Tokens,
    Wanted,
    comparable,
    spread,
    step_of,
)
from .guarded import taken

MEASURED_OUTPUTS = (Within, Exact, QuantisedPair)


def wanted_here(spec: OpSpec, args: Sequence[Any], scale: torch.Tensor | float) -> Expected:
    """Compute expected outputs in fp64, like `wanted_of` but on the device of the arguments.

    Args:
        spec: the contract. The kinds of its outputs must be in `MEASURED_OUTPUTS`.
        scale: as `Sample.scale`, or one number per row of the results.
    """
    return _each_wanted(spec, args, scale, "a call")[1]


def wanted_of(spec: OpSpec, sample: Sample, *, tokens: int | None = None) -> list[Wanted | None]:
    """Compute expected outputs in fp64 on the CPU.

    Args:
        tokens: the number of rows that every result must have; None for any number.

    Returns:
        One item per output. An output that is missing in this call has None for each of its
        results.

    Raises:
        ValueError: the contract contradicts itself. The message explains how.
    """
    args, columns = sample.repeats or (sample.args, None)
    on_host = [a.detach().cpu() if isinstance(a, torch.Tensor) else a for a in args]
    where = f"the contract of {spec.name}, sample {sample.name!r}"
    exact, wanted = _each_wanted(spec, on_host, sample.scale, where)
    for index, part in enumerate(exact if tokens is not None else ()):
        if part is not None and part.shape[:1] != (tokens,):
            raise ValueError(
                f"{where}: result {index} has the shape {_shape(part)} for {tokens} tokens, "
                "not one row per token; such a contract needs whole_batch=True"
            )
    if columns is not None:
        given = [part if part is None else (*part.shape[:-1], len(columns)) for part in exact]
        if given != (shapes := [*map(_shape, parts(spec.fake(*sample.args)))]):
            raise ValueError(
                f"{where}: the smaller call that it repeats returns the shapes {given}, the fake "
                f"{shapes}"
            )
        wanted = [want and want.columns(columns.cpu()) for want in wanted]
    if not sample.open_rows:
        return wanted
    kept = _kept(sample, max(len(part) for part in exact if part is not None))
    return [want and want.rows(kept) for want in wanted]


def closed(got: Any, sample: Sample) -> Any:
    """Remove the sample's open rows from results, because their values are not defined."""
    if not sample.open_rows:
        return got
    kept = _kept(sample, max(len(part) for part in parts(got) if part is not None))
    return each_part(got, lambda part: part if part.numel() == 1 else taken(part, kept))


def _kept(sample: Sample, rows: int) -> torch.Tensor:
    return torch.tensor([row for row in range(rows) if row not in sample.open_rows])


def _each_wanted(
    spec: OpSpec, args: Sequence[Any], scale: torch.Tensor | float, where: str
) -> tuple[Sequence[Any], list[Wanted | None]]:
    try:
        exact, shapes = parts(spec.oracle(*args)), parts(spec.fake(*args))
    except Exception as error:  # an error of the contract, not of the implementation
        raise ValueError(f"{where}: its oracle or its fake raised {quote(error)}") from error
    own, faked = ([*map(_shape, some)] for some in (exact, shapes))
    if own != faked:
        raise ValueError(f"{where}: the oracle returns the shapes {own}, the fake {faked}")
    if spec.variants and (given := _given(spec, args)) != len(exact):
        raise ValueError(
            f"{where}: the oracle returns {len(exact)} results, the variant for this call {given}; "
            "if arguments decide the number of results, each number needs a Variant"
        )
    wanted: list[Wanted | None] = []
    at = 0
    for output in spec.outputs_of(len(exact)):
        end = at + output.results
        mine, like = exact[at:end], shapes[at:end]
        absent = [part is None for part in mine]
        if any(absent) and not all(absent):
            raise ValueError(f"{where}: one result of the {type(output).__name__} at {at} is None")
        if any(absent):
            wanted += [None] * output.results
        else:
            wanted.append(_wanted(spec, output, mine, like, scale, args))
        at = end
    return exact, wanted


def _given(spec: OpSpec, args: Sequence[Any]) -> int:
    """Return the number of results of the contract's variant for these arguments, or 0."""
    absent = {name for name, arg in spec.named(args).items() if arg is None}
    takes = [v for v in spec.variants if absent.issuperset({*spec.parameters} - {*v.parameters})]
    fewest = min(takes, key=lambda v: len(v.parameters), default=None)
    return fewest.returns + fewest.pads if fewest else 0


def _wanted(
    spec: OpSpec,
    output: Output,
    exact: Sequence[torch.Tensor],
    like: Sequence[torch.Tensor],
    scale: Any,
    args: Sequence[Any],
) -> Wanted:
    match output:
        case Exact():
            return Same(comparable(exact[0], like[0].dtype))
        case QuantisedPair():
            step = step_of(exact[0], spread(exact[1], exact[0].shape), like[0].dtype)
            scales = _near(spec, output, exact[1], like[1].dtype, scale)
            slack = (scales.allowed / exact[1].abs()).nan_to_num(0.0, 0.0, 0.0)
            room = output.steps * step + spread(slack, exact[0].shape) * exact[0].abs()
            return Pair(Near(exact[0], room, like[1].dtype), scales)
        case ExpertBlocks():
            rows, experts, used = (part.to(torch.int64) for part in exact)
            size, padding = output.block_size(*args), output.padding(*args)
            return Blocks(rows, experts, used, size, padding)
        case Routing():
            ids, order = exact[1].to(torch.int64).sort(-1)
            weights = _near(spec, output, exact[0].gather(-1, order), like[0].dtype, scale)
            return Routed(weights, ids, output.scores(*args).double(), output.margin * scale)
        case _:
            return _near(spec, output, exact[0], like[0].dtype, scale)


def _near(
    spec: OpSpec, output: Output, exact: torch.Tensor, dtype: torch.dtype, scale: Any
) -> Near:
    tolerance = spec.tolerance(dtype, output)
    if isinstance(scale, torch.Tensor):
        of_rows = exact.ndim > 0 and scale.shape == exact.shape[:1]
        scale = scale.view(-1, *[1] * (exact.ndim - 1)) if of_rows else scale.amax()
    return Near(exact, tolerance.atol * scale + tolerance.rtol * exact.abs(), dtype)


def worst(got: Any, wanted: Expected, places: Tokens = None) -> Deviation:
    """Return the error of a call's results.

    Args:
        got: one result or several, with the contract's shapes and dtypes.
        places: token numbers of the results' rows, for the message; None for all rows.
    """
    largest = 0.0
    for want, mine, names in paired(got, wanted):
        share, problem = want.deviation(mine, names, places)
        if problem:
            return share, problem
        largest = max(largest, share)
    return largest, ""


def measures(got: Any, wanted: Expected, what: Literal["bias", "slope"]) -> dict[str, float]:
    """Return result -> measure of its errors. Omits results with too few elements. Arguments are as
    for `worst`."""
    found = {names[0]: getattr(want, what)(mine) for want, mine, names in paired(got, wanted)}
    return {name: number for name, number in found.items() if not math.isnan(number)}


def paired(got: Any, wanted: Expected) -> Iterator[tuple[Wanted, list[torch.Tensor], list[str]]]:
    """Yield (expected output, its results, their names for messages). Omits empty outputs."""
    at, results = 0, parts(got)
    for want in wanted:
        end = at + (want.results if want is not None else 1)
        mine = results[at:end]
        if want is not None and not want.is_empty(mine):
            is_one = not isinstance(got, tuple)
            names = ["the result" if is_one else f"result {index}" for index in range(at, end)]
            yield want, [part.detach() for part in mine], names
        at = end


def parts(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def each_part(result: Any, change: Callable[[Any], Any]) -> Any:
    changed = tuple(part if part is None else change(part) for part in parts(result))
    return changed if isinstance(result, tuple) else changed[0]


def float_activations(spec: OpSpec, args: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return the floating-point activations of a call, without empty ones."""
    of_token = ((name, arg) for name, arg in spec.named(args).items() if name in spec.by_token)
    tensors = ((name, arg) for name, arg in of_token if isinstance(arg, torch.Tensor))
    return {name: arg for name, arg in tensors if arg.is_floating_point() and arg.numel()}


def magnitudes(spec: OpSpec, args: Sequence[Any]) -> torch.Tensor | float:
    """Return the maximum magnitude of the finite activations in each row of a call, at least 1.
    Magnitudes of 8-bit activations are multiplied by those of their scales."""
    wide, is_scaled = [], False
    for name, arg in float_activations(spec, args).items():
        rows = len(arg) if spec.has_rows(name, arg) else 1
        wide.append(arg.double().abs().nan_to_num_(0.0, 0.0, 0.0).reshape(rows, -1).amax(1))
        is_scaled |= arg.itemsize == 1
    by = torch.mul if is_scaled else torch.maximum
    return reduce(by, wide).clamp(min=1.0) if wide else 1.0


def _shape(part: Any) -> tuple[int, ...] | None:
    return None if part is None else tuple(part.shape)
