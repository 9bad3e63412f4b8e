"""A quantised pair, with a scale for each row or for each group of a row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts import (
    BadInput,
    ModelSizes,
    OpSpec,
    QuantisedPair,
    Sample,
    Tolerance,
    Variant,
)
from vllm_fl.contracts.arguments import Problem
from vllm_fl.contracts.sampling import Source

if TYPE_CHECKING:
    import torch


def quantise(x: torch.Tensor, group: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, hidden) -> int8 of its shape, and fp32 scales: (tokens,) or (tokens, groups).

    A scale is the largest absolute value of its row, or of `group` features of it, over 127.
    """
    exact = x.double()
    parts = exact if group is None else exact.unflatten(-1, (-1, group))
    return exact, parts.abs().amax(-1).clamp(min=1e-10) / 127


def _fake(x: torch.Tensor, group: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    tokens, hidden = x.shape
    shape = (tokens,) if group is None else (tokens, hidden // group)
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(shape, dtype=torch.float32)


def _check(x: Any, group: Any = None) -> Problem:
    if not getattr(x, "is_floating_point", bool)() or x.ndim != 2:
        return "x", f"must be a floating tensor (tokens, hidden), got {x!r}"
    if group is not None and x.shape[-1] % group:
        return "group", f"must divide {x.shape[-1]}, got {group}"
    return None


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    import torch

    source = Source(dtype, device)
    for group in (None, 32):
        how = f", groups of {group}" if group else ""
        yield Sample(f"1 token{how}", (source.normal(1, 128), group))
        yield Sample(f"0 tokens{how}", (source.normal(0, 128), group))
        yield Sample(f"7 tokens{how}", (source.normal(7, 96), group))
        ties = torch.arange(128, device=source.device).sub(64).add(0.5).to(dtype).expand(3, 128)
        ties = ties.clone()
        ties[:, ::32] = 127.0  # a scale of 1, and every other number between two steps
        yield Sample(f"ties{how}", (ties, group))
        padded = source.normal(3, 64)
        padded[1] = 0.0
        yield Sample(f"a row of zeros{how}", (padded, group))


def _served(
    sizes: ModelSizes, dtype: torch.dtype, device: torch.device, large: bool = False
) -> Iterator[Sample]:
    for tokens in sizes.tokens:
        for group in (None, 64):
            x = Source(dtype, device, large).normal(tokens, 256, scale=100.0 if large else 1.0)
            yield Sample(f"{tokens} x 256 by {group}{', large' * large}", (x, group))


def _bad_inputs(dtype: torch.dtype, device: torch.device) -> Iterator[BadInput]:
    source = Source(dtype, device)
    yield BadInput("3-D", (source.normal(2, 3, 4), None), "x")
    yield BadInput("no whole group", (source.normal(2, 7), 2), "group")


SPEC = OpSpec(
    oracle=quantise,
    variants=(Variant("", "(Tensor x, SymInt? group=None) -> (Tensor, Tensor)"),),
    fake=_fake,
    check=_check,
    samples=_samples,
    served=_served,
    by_token=frozenset({"x"}),
    bad_inputs=_bad_inputs,
    dtypes=("float32", "float16", "bfloat16"),
    outputs=(
        QuantisedPair(
            tolerances={"float32": Tolerance(1e-6, 0.0, "one division in fp32, of fp32 numbers")}
        ),
    ),
)
