"""What the contracts of routing share: inputs without chance ties, and the checks of parameters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.checks import Problem, floating_tensor, on_device_of, shaped
from vllm_fl.contracts.sampling import UNIQUE_ROWS, Source

if TYPE_CHECKING:
    import torch

__all__ = [
    "MARGIN",
    "SCORING",
    "bias_for_choice",
    "by_argmax",
    "check_bias",
    "check_factor",
    "check_logits",
    "check_scoring",
    "check_topk",
    "highest",
    "router_logits",
    "scored",
    "whole_number",
]

SCORING = ("softmax", "sigmoid")
"""How a router turns logits into scores."""

MARGIN = 5e-7
"""How far apart two scores, which are at most 1 before a bias, must be for their order to be
certain: fp32's rounding of a score and of its sum with a bias, several times."""

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


def bias_for_choice(source: Source, experts: int, scale: float) -> torch.Tensor:
    """(experts,) in float32, as models keep it."""
    import torch

    return source.normal(experts, scale=scale, dtype=torch.float32)


def check_logits(name: str, value: Any) -> Problem:
    """`value` must be a floating tensor of shape (tokens, experts)."""
    problem = floating_tensor(name, value)
    if problem is None and (value.ndim != 2 or not value.shape[1]):
        return name, f"must have the shape (tokens, experts), got {tuple(value.shape)}"
    return problem


def check_topk(name: str, value: Any, most: int) -> Problem:
    """`value` must be a whole number of experts."""
    problem = whole_number(name, value)
    if problem is None and not 1 <= value <= most:
        return name, f"must be from 1 to {most}, got {value}"
    return problem


def whole_number(name: str, value: Any) -> Problem:
    """`value` must be an integer."""
    if isinstance(value, bool) or not isinstance(value, int):
        return name, f"must be an integer, got {type(value).__name__}"
    return None


def check_scoring(value: Any) -> Problem:
    """`value` must name a function that turns logits into scores."""
    if value not in SCORING:
        return "scoring_func", f"must be one of {', '.join(SCORING)}, got {value!r}"
    return None


def check_factor(value: Any) -> Problem:
    """`value` must be a finite number."""
    name = "routed_scaling_factor"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return name, f"must be a number, got {type(value).__name__}"
    return None if math.isfinite(value) else (name, f"must be finite, got {value}")


def check_bias(value: Any, logits: torch.Tensor) -> Problem:
    """`value` must be None or one floating number for each expert."""
    if value is None:
        return None
    name = "e_score_correction_bias"
    return (
        floating_tensor(name, value)
        or on_device_of(name, value, "gating_output", logits)
        or shaped(name, value, logits.shape[1:], "the shape (experts,)")
    )
