"""Variants of a call with different layouts and sizes of its activations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from vllm_fl.contracts.spec import OpSpec, Sample

from .guarded import taken

ROWS = 300
"""Rows of an enlarged sample: more than a tile of 256."""

MOST = 2**19
"""Maximum number of elements in an enlarged sample's activations."""


def relaid(spec: OpSpec, samples: Iterable[Sample]) -> Iterator[Sample]:
    """Yield calls with one activation in a different layout: with gaps between elements, or
    transposed. For each set of present arguments, they are made from the first sample with two or
    more tokens, and with two or more features in its first activation. The `check` of the contract
    must accept the layout."""
    seen = set()
    for sample in samples:
        given = tuple(arg is None for arg in sample.args)
        rows = spec.with_rows(sample.args)
        lengths = [*map(len, rows.values()), *(x.shape[-1] for x in [*rows.values()][:1])]
        if given in seen or min(lengths, default=0) < 2:
            continue
        seen.add(given)
        for name, x in rows.items():
            at = spec.parameters.index(name)
            for how, other in (("numbers apart", _apart(x)), ("transposed in memory", _turned(x))):
                args = (*sample.args[:at], other, *sample.args[at + 1 :])
                if other.stride() != x.stride() and spec.check(*args) is None:
                    called = f"{sample.name}, {name} {how}"
                    yield replace(sample, name=called, args=args, relaid=True)


def enlarged(spec: OpSpec, samples: Iterable[Sample]) -> Iterator[Sample]:
    """Yield samples with few rows, extended to 300 rows by random repetition, with equal strides.
    They test options and layouts of small samples with more rows. For each set of options and
    layouts, the first sample that is not too large is used. Contracts with fixed batches have no
    such samples.
    """
    seen = set()
    for sample in () if spec.fixed_batch else samples:
        count, given = spec.tokens(sample.args), tuple(map(_option, sample.args))
        numbers = sum(x.numel() for x in spec.with_rows(sample.args).values())
        if not 0 < count < ROWS or ROWS * numbers > MOST * count or given in seen:
            continue
        seen.add(given)
        generator = torch.Generator("cpu").manual_seed(count)
        drawn = torch.randint(count, (ROWS,), generator=generator, device="cpu")
        drawn[:count] = torch.arange(count, device="cpu")
        args = spec.with_changed_rows(sample.args, partial(_stretched, rows=drawn))
        if spec.check(*args) is None:
            of = (row for row, source in enumerate(drawn.tolist()) if source in sample.open_rows)
            name, is_open = f"{sample.name}, {ROWS} rows", (*of,)
            yield replace(sample, name=name, args=args, open_rows=is_open, enlarged=True)


def _option(arg: Any) -> Any:
    if not hasattr(arg, "stride"):
        return str(arg)
    return arg.dtype, arg.ndim, arg.is_contiguous(), arg.stride()[-1:]


def _stretched(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return these rows of a tensor. If its rows do not overlap, the strides are the same."""
    drawn = taken(x, rows)
    ends = 1 + sum((n - 1) * step for n, step in zip(x.shape[1:], x.stride()[1:], strict=True))
    if not x.numel() or x.stride(0) < ends:
        return drawn
    memory = torch.zeros(len(rows) * x.stride(0), dtype=x.dtype, device=x.device)
    return memory.as_strided(drawn.shape, x.stride()).copy_(drawn)


def _apart(x: torch.Tensor) -> torch.Tensor:
    """Return a copy that uses every other element of a tensor that is twice as wide."""
    gap = torch.full_like(x, float("nan") if x.is_floating_point() else 0)
    return torch.stack((x, gap), dim=-1)[..., 0]


def _turned(x: torch.Tensor) -> torch.Tensor:
    dims = tuple(range(x.ndim))[::-1]
    return x.permute(dims).contiguous().permute(dims)
