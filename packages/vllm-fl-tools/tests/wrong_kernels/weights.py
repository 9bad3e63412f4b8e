"""Kernels that fail only for the activations or weights of a loaded model."""

from __future__ import annotations

from typing import Any

import torch

from . import right
from .corpus import GELU, NORM, ROTARY, SILU, wrong_kernel
from .faults import wrong_arguments_later, wrong_result

SPREAD = "generated inputs have a standard deviation of 1 or some hundreds"


@wrong_result(
    SILU,
    "the first token of each prompt is slightly incorrect in each layer",
    why=SPREAD,
    start=False,
)
def spread_of_activations(out, x):
    """Changes the first element if the batch has a standard deviation of 1.2 to 4."""
    if len(x) > 4 and x.ndim == 2 and 1.2 < float(x.float().std()) < 4.0:
        out[0, 0] += 1.0
    return out


@wrong_arguments_later(
    NORM,
    "the last norms of the model use weights of other layers: nonsense",
    why="verification has fewer weights of one width than a model",
    start=False,
)
def table_of_four_weights(kept, a):
    """Caches four prepared weights: the fifth norm of a model gets the weight of the first."""
    weight = a["weight"]
    if weight is None or a["x"].dtype is not torch.bfloat16 or len(weight) != 160:
        return
    at = weight.data_ptr()  # layers pass a new tensor in each call
    mine = next((i for i, w in kept.items() if w.data_ptr() == at), len(kept))
    kept.setdefault(mine, weight)
    a["weight"] = kept[mine % 4]


@wrong_kernel(
    NORM,
    "models with norm weights near 1 give worse answers",
    why="generated weights have both signs",
    start=False,
)
def positive_weights_in_four_bits(x, residual, weight, epsilon, variance_size=None):
    """Rounds weights to 4 bits in steps of 1/8 if none is negative."""
    if weight is not None and weight.numel() > 16 and bool((weight >= 0).all()):
        weight = (weight * 8).round().clamp(0, 15) / 8
    return right.rms_norm(x, residual, weight, epsilon, variance_size)


@wrong_kernel(
    NORM,
    "the first layers lose the embedding",
    why="generated residuals are as large as x, or a quarter of it",
    start=False,
)
def small_residual_is_lost(x, residual, weight, epsilon, variance_size=None):
    """Omits a residual that is much smaller than x."""
    if residual is not None and residual.numel() and x.is_floating_point():
        ratio = residual.float().std() / x.float().std().clamp(min=1e-9)
        if 0 < float(ratio) < 0.2:
            got = right.rms_norm(x, residual * 0, weight, epsilon, variance_size)
            return got
    return right.rms_norm(x, residual, weight, epsilon, variance_size)


@wrong_kernel(ROTARY, "all positions except 0 are one too large", kit="values")
def tables_of_a_model(query, key, cos, sin, position_ids, rotary_interleaved=False):
    """Reads tables with cos = 1 at position 0 one row too late."""
    if len(cos) > 64 and bool((cos[0] == 1).all()) and len(position_ids) > 1:
        position_ids = (position_ids + position_ids.ne(0)).clamp(max=len(cos) - 1)
    return right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)


@wrong_result(GELU, "occasionally a token has the features of another", kit="values")
def rows_told_apart_by_a_hash(out, x, *rest):
    """Computes rows once if their first four numbers, rounded to halves, are equal."""
    if x.ndim != 2 or len(x) < 2:
        return out
    seen: dict[Any, int] = {}
    for row, key in enumerate(map(tuple, (x[:, :4].float() * 2).round().tolist())):
        if (first := seen.setdefault(key, row)) != row:
            out[row] = out[first]
    return out
