"""What the contracts of routing share: scores, and inputs without chance ties."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vllm_fl.contracts.arguments import tensor
from vllm_fl.contracts.sampling import UNIQUE_ROWS, Source

if TYPE_CHECKING:
    import torch

__all__ = [
    "MARGIN",
    "RESULTS",
    "SCORING",
    "bias_for_choice",
    "by_argmax",
    "highest",
    "router_logits",
    "scored",
    "taken_ids",
]

SCORING = ("softmax", "sigmoid")
"""How a router turns logits into scores."""

MARGIN = 5e-7
"""How far apart two scores, which are at most 1 before a bias, must be for their order to be
certain: fp32's rounding of a score and of its sum with a bias, several times."""

RESULTS = (tensor("tokens, topk", "float32"), tensor("tokens, topk", "int32"))
"""The weights of a token's experts, and their ids."""

_GRID = 1024
"""Different numbers of 8 significant bits from 1/8 to 2 and from -2 to -1/8."""


def scored(logits: torch.Tensor, scoring_func: str) -> torch.Tensor:
    """The scores of every expert, in fp64; ValueError for an unknown function."""
    if scoring_func not in SCORING:
        raise ValueError(f"scoring_func must be one of {', '.join(SCORING)}, got {scoring_func!r}")
    wide = logits.double()
    return wide.softmax(-1) if scoring_func == "softmax" else wide.sigmoid()


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The ids of the `count` highest scores, the highest first; of equal ones the lower id."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def by_argmax(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The same, found one after the other."""
    import torch

    left, found = scores.clone(), []
    for _ in range(count):
        found.append(left.argmax(-1, keepdim=True))
        left.scatter_(-1, found[-1], -math.inf)
    return torch.cat(found, dim=-1)


def router_logits(source: Source, tokens: int, experts: int, spread: float = 1.0) -> torch.Tensor:
    """(tokens, experts), the numbers of a token in random order and all different.

    Random numbers are equal often when they are rounded to 16 bits, and whoever breaks a tie in
    another way would choose other experts. Up to 1024 experts these are exact in every dtype.

    Args:
        source: where the order comes from.
        tokens, experts: the sizes.
        spread: a power of two that multiplies the numbers, which lie between -4 and 4.
    """
    import torch

    rows = min(tokens, UNIQUE_ROWS)
    order = source.normal(rows, experts, dtype=torch.float32).argsort(-1).argsort(-1)
    steps = torch.arange(_GRID // 2, device=source.device)
    # Written by their bits, as fp32 numbers whose lower 16 bits are 0.
    bits = ((124 << 7) + steps).to(torch.int32) << 16
    positive = bits.view(torch.float32)
    grid = torch.cat((-positive.flip(0), positive)) * spread
    at = (order * _GRID).div(experts, rounding_mode="floor")
    scale = 2.0 ** (torch.arange(rows, device=source.device) % 3 - 1)
    block = (grid[at] * scale.unsqueeze(-1)).to(source.dtype)
    return block if rows == tokens else block[source.rows(tokens)]


def taken_ids(source: Source, tokens: int, topk: int, experts: int) -> torch.Tensor:
    """(tokens, topk): experts of each token, no expert twice, and some experts without a token."""
    import torch

    return source.normal(tokens, experts, dtype=torch.float32).argsort(-1)[:, :topk]


def bias_for_choice(source: Source, experts: int, scale: float) -> torch.Tensor:
    """(experts,) in float32, as models keep it."""
    import torch

    return source.normal(experts, scale=scale, dtype=torch.float32)
