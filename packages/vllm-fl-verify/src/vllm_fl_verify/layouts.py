"""Other layouts of a call's activations: the same numbers, otherwise in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch

from vllm_fl.contracts.spec import OpSpec, Sample

__all__ = ["relaid"]


def relaid(spec: OpSpec, samples: Iterable[Sample]) -> Iterator[Sample]:
    """Calls of which one activation lies otherwise: with gaps between its numbers, or transposed.

    Of each set of arguments that are not None they are made of the first sample with two tokens or
    more, whose first activation has two features or more. What the contract's `check` refuses is
    left out.

    Args:
        spec: the contract. Its activations are the arguments of `by_token`.
        samples: its samples.
    """
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
                    yield dataclasses.replace(sample, name=called, args=args, relaid=True)


def _apart(x: torch.Tensor) -> torch.Tensor:
    """Every other number of a tensor that is twice as wide."""
    gap = torch.full_like(x, float("nan") if x.is_floating_point() else 0)
    return torch.stack((x, gap), dim=-1)[..., 0]


def _turned(x: torch.Tensor) -> torch.Tensor:
    """With the tokens of a feature side by side."""
    dims = tuple(range(x.ndim))[::-1]
    return x.permute(dims).contiguous().permute(dims)
