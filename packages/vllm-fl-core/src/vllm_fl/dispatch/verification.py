"""Comparing an implementation with the oracle: shared by start-up, `vllm-fl verify` and the kit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .contracts import OpSpec, Sample
from .types import OpImpl

__all__ = ["Comparison", "compare", "compare_all", "dtype_name"]


COMPARED = 128
"""Tokens compared at each end of a large batch, and as many between them."""


@dataclass(frozen=True)
class Comparison:
    """One sample run through one implementation.

    Args:
        op, impl_id, sample, dtype: what was run.
        status: `ok`; `refused` (by `supports` or NotImplementedError); `wrong` (the result, or an
            argument that was overwritten without being declared); `raised`.
        share: the worst error as a share of the tolerance; 1 is the limit. NaN unless compared.
        reason: why it is not `ok`, or empty.
        error: the exception, when it raised.
    """

    op: str
    impl_id: str
    sample: str
    dtype: str
    status: Literal["ok", "refused", "wrong", "raised"]
    share: float = math.nan
    reason: str = ""
    error: Exception | None = None


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def compare(impl: OpImpl, spec: OpSpec, sample: Sample, dtype: torch.dtype) -> Comparison:
    """Run one sample and compare the result with the oracle.

    The oracle is computed in fp64 on the CPU before the implementation runs, since that may
    overwrite what it consumes. The sample's tensors are used up.

    Args:
        impl: an implementation that takes the contract's parameters.
        spec: its op's contract.
        sample: the arguments, on the implementation's device.
        dtype: the dtype that the sample was made for.
    """
    fixed = (impl.op_name, impl.impl_id, sample.name, dtype_name(dtype))
    args = sample.args
    if impl.supports is not None:
        verdict = impl.supports(*args)
        if verdict is not True:
            return Comparison(*fixed, "refused", reason=str(verdict))
    rows = _compared_rows(spec, sample)
    on_host = [
        _rows(arg, rows if name in sample.by_token else None).detach().cpu()
        if isinstance(arg, torch.Tensor)
        else arg
        for name, arg in zip(spec.parameters, args, strict=True)
    ]
    want = spec.oracle(*on_host)
    shapes = spec.fake(*args)
    consumed = spec.consumed(impl.consumes, args)
    before = {
        name: arg.detach().clone()
        for name, arg in zip(spec.parameters, args, strict=True)
        if isinstance(arg, torch.Tensor) and name not in consumed
    }
    try:
        got = impl.fn(*args)
        if isinstance(got, torch.Tensor) and got.is_cuda:
            torch.cuda.synchronize(got.device)  # a fault of the kernel belongs to this sample
    except NotImplementedError as error:
        return Comparison(*fixed, "refused", reason=str(error) or "NotImplementedError")
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return Comparison(*fixed, "raised", reason=reason, error=error)
    share, problem = _judge(got, want, shapes, spec, rows)
    if not problem:
        for name, arg in zip(spec.parameters, args, strict=True):
            if name in before and not _same(before[name], arg):
                problem = f"overwrote {name!r}, which " + (
                    f"stays intact without {', '.join(sorted(spec.consumed_with[name]))}"
                    if name in impl.consumes
                    else "it does not declare in consumes"
                )
                break
    if problem:
        return Comparison(*fixed, "wrong", share, problem)
    return Comparison(*fixed, "ok", share)


def compare_all(
    impl: OpImpl, spec: OpSpec, dtypes: Iterable[torch.dtype], device: torch.device
) -> Iterator[Comparison]:
    """Run every sample of the contract in every dtype, one after the other."""
    for dtype in dtypes:
        for sample in spec.samples(dtype, device):
            yield compare(impl, spec, sample, dtype)


def _compared_rows(spec: OpSpec, sample: Sample) -> torch.Tensor | None:
    """The tokens of a large batch that are compared: both ends and a spread; None for all."""
    tokens = min(
        (
            len(arg)
            for name, arg in zip(spec.parameters, sample.args, strict=True)
            if name in sample.by_token and isinstance(arg, torch.Tensor)
        ),
        default=0,
    )
    if tokens <= 3 * COMPARED:
        return None
    ends = (torch.arange(COMPARED), torch.arange(tokens - COMPARED, tokens))
    return torch.cat((*ends, torch.linspace(COMPARED, tokens - COMPARED, COMPARED).long()))


def _rows(tensor: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return tensor if rows is None else tensor[rows.to(tensor.device)]


def _judge(
    got: Any, want: Any, shapes: Any, spec: OpSpec, rows: torch.Tensor | None
) -> tuple[float, str]:
    """(worst error as a share of the tolerance, what is wrong or empty)."""
    if isinstance(shapes, tuple) != isinstance(got, tuple):
        return math.nan, f"returned {_kind(got)}, expected {_kind(shapes)}"
    parts = zip(_parts(got), _parts(want), _parts(shapes), strict=False)
    if len(_parts(got)) != len(_parts(shapes)):
        return math.nan, f"returned {_kind(got)}, expected {_kind(shapes)}"
    worst = 0.0
    for index, (mine, exact, shape) in enumerate(parts):
        where = f"result {index}" if isinstance(got, tuple) else "the result"
        if shape is None or mine is None:
            if shape is not mine:
                return math.nan, f"{where} is {_kind(mine)}, expected {_kind(shape)}"
            continue
        if not isinstance(mine, torch.Tensor):
            return math.nan, f"{where} is {_kind(mine)}, expected a tensor"
        if mine.shape != shape.shape:
            return math.nan, f"{where} has shape {tuple(mine.shape)}, not {tuple(shape.shape)}"
        if mine.dtype != shape.dtype:
            return math.nan, f"{where} has dtype {mine.dtype}, not {shape.dtype}"
        if mine.device != shape.device:
            return math.nan, f"{where} lies on {mine.device}, not {shape.device}"
        tolerance = spec.tolerance(mine.dtype)
        off = (_rows(mine.detach(), rows).cpu().to(torch.float64) - exact).abs()
        shares = off / (tolerance.atol + tolerance.rtol * exact.abs())
        share = float(shares.max()) if shares.numel() else 0.0
        if not share <= 1.0:
            count = int((~(shares <= 1.0)).sum())
            return share, (
                f"{where}: {count} of {shares.numel()} elements are off, the worst by "
                f"{share:.3g} times the tolerance"
            )
        worst = max(worst, share)
    return worst, ""


def _parts(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _kind(result: Any) -> str:
    if isinstance(result, tuple):
        return f"a tuple of {len(result)}"
    return "None" if result is None else f"a {type(result).__name__}"


def _same(before: torch.Tensor, after: torch.Tensor) -> bool:
    return bool(torch.equal(before, after)) or bool(
        ((before == after) | (before.isnan() & after.isnan())).all()
    )
