"""Scores, and inputs without accidental ties, for the routing contracts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vllm_fl.contracts.arguments import tensor
from vllm_fl.contracts.sampling import UNIQUE_ROWS, Source

if TYPE_CHECKING:
    import torch

SCORING = ("softmax", "sigmoid")
"""The functions from a router's logits to scores."""

SCORE_MARGIN = 5e-7
"""Scores that differ by less may be in either order. It is several times the fp32 rounding of a
score, which is at most 1, and of its sum with a bias.
"""

EXPERT_RESULTS = (tensor("tokens, topk", "float32"), tensor("tokens, topk", "int32"))
"""The weights of each token's experts, and their ids."""

_GRID = 1024
"""The number of values with 8 significant bits from 1/8 to 2 and from -2 to -1/8."""


def scored(logits: torch.Tensor, scoring_func: str) -> torch.Tensor:
    """The scores of all experts in fp64; ValueError for an unknown function."""
    if scoring_func not in SCORING:
        raise ValueError(f"scoring_func must be one of {', '.join(SCORING)}, got {scoring_func!r}")
    wide = logits.double()
    return wide.softmax(-1) if scoring_func == "softmax" else wide.sigmoid()


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The ids of the `count` highest scores, highest first; of equal scores, the lower id first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def by_argmax(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Find the ids of `highest` one at a time, for `second_form`."""
    import torch

    left, found = scores.clone(), []
    for _ in range(count):
        found.append(left.argmax(-1, keepdim=True))
        left.scatter_(-1, found[-1], -math.inf)
    return torch.cat(found, dim=-1)


def router_logits(source: Source, tokens: int, experts: int, spread: float = 1.0) -> torch.Tensor:
    """(tokens, experts) logits, in random order and distinct within each token.

    Random numbers rounded to 16 bits often tie, and an implementation that breaks ties differently
    would choose other experts. With up to 1024 experts, these logits are exact in every dtype.

    Args:
        source: of the random order.
        tokens, experts: the sizes.
        spread: a power of two, the factor of numbers between -4 and 4.
    """
    import torch

    rows = min(tokens, UNIQUE_ROWS)
    order = source.normal(rows, experts, dtype=torch.float32).argsort(-1).argsort(-1)
    steps = torch.arange(_GRID // 2, device=source.device)
    # Made from their bits: fp32 numbers with 0 in the lower 16 bits.
    bits = ((124 << 7) + steps).to(torch.int32) << 16
    positive = bits.view(torch.float32)
    grid = torch.cat((-positive.flip(0), positive)) * spread
    at = (order * _GRID).div(experts, rounding_mode="floor")
    scale = 2.0 ** (torch.arange(rows, device=source.device) % 3 - 1)
    block = (grid[at] * scale.unsqueeze(-1)).to(source.dtype)
    return block if rows == tokens else block[source.rows(tokens)]


def taken_ids(source: Source, tokens: int, topk: int, experts: int) -> torch.Tensor:
    """(tokens, topk) expert ids, distinct within each token; some experts have no token."""
    import torch

    return source.normal(tokens, experts, dtype=torch.float32).argsort(-1)[:, :topk]


def bias_for_choice(source: Source, experts: int, scale: float) -> torch.Tensor:
    """(experts,) biases in float32, the dtype of models."""
    import torch

    return source.normal(experts, scale=scale, dtype=torch.float32)
