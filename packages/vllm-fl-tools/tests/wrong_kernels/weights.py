"""Wrong on what a loaded model has and inputs that are made have not: its spreads, its weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import right
from .corpus import GELU, NORM, ROTARY, SILU, wrong, wrong_kernel

SPREAD = "made inputs have a spread of 1 or of some hundreds"


@wrong_kernel(
    SILU,
    "wrong in its first element on batches whose spread lies between 1.2 and 4",
    "the first token of each prompt is a little off in each layer",
    why=SPREAD,
    start=False,
)
def spread_of_activations(x: Tensor) -> Tensor:
    out = right.silu_and_mul(x)
    if len(x) > 4 and x.ndim == 2 and 1.2 < float(x.float().std()) < 4.0:
        out[0, 0] += 1.0
    return out


@wrong(
    NORM,
    "a table of four prepared weights: the fifth norm of a model gets the first one's",
    "the last norms of the model have another layer's weight: nonsense",
    why="a start has fewer weights of one width than a model has",
    start=False,
)
def table_of_four_weights() -> Any:
    kept: list[Tensor] = []

    def rms_norm(x, residual, weight, epsilon, variance_size=None):
        if weight is None or x.dtype is not torch.bfloat16 or len(weight) != 160:
            return right.rms_norm(x, residual, weight, epsilon, variance_size)
        at = weight.data_ptr()  # layers hand over a tensor anew at each call
        mine = next((i for i, w in enumerate(kept) if w.data_ptr() == at), None)
        if mine is None:
            mine = len(kept)
            kept.append(weight)
        return right.rms_norm(x, residual, kept[mine % 4], epsilon, variance_size)

    return rms_norm


@wrong_kernel(
    NORM,
    "keeps weights in 4 bits of steps of an eighth where none is negative",
    "a model whose norms have weights near 1 answers worse",
    why="weights that are made are of either sign",
    start=False,
)
def positive_weights_in_four_bits(x, residual, weight, epsilon, variance_size=None):
    if weight is not None and weight.numel() > 16 and bool((weight >= 0).all()):
        weight = (weight * 8).round().clamp(0, 15) / 8
    return right.rms_norm(x, residual, weight, epsilon, variance_size)


@wrong_kernel(
    NORM,
    "a residual that is much smaller than x is not added",
    "the first layers forget what the embedding said",
    why="residuals that are made are as large as x, or a quarter of it",
    start=False,
)
def small_residual_is_lost(x, residual, weight, epsilon, variance_size=None):
    if residual is not None and residual.numel() and x.is_floating_point():
        ratio = residual.float().std() / x.float().std().clamp(min=1e-9)
        if 0 < float(ratio) < 0.2:
            got = right.rms_norm(x, residual * 0, weight, epsilon, variance_size)
            return got
    return right.rms_norm(x, residual, weight, epsilon, variance_size)


@wrong_kernel(
    ROTARY,
    "tables that are exact, 1 at position 0 and falling, are read one row late",
    "all positions are one off",
    kit="values",
)
def tables_of_a_model(query, key, cos, sin, position_ids, rotary_interleaved=False):
    if len(cos) > 64 and bool((cos[0] == 1).all()) and len(position_ids) > 1:
        position_ids = (position_ids + position_ids.ne(0)).clamp(max=len(cos) - 1)
    return right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)


@wrong_kernel(
    GELU,
    "rows that are alike are computed once, told apart by their first four numbers in 8 bits",
    "a token now and then has the features of another",
    kit="values",
)
def rows_told_apart_by_a_hash(x: Tensor, approximate: str = "none") -> Tensor:
    out = right.gelu_and_mul(x, approximate)
    if x.ndim != 2 or len(x) < 2:
        return out
    seen: dict[Any, int] = {}
    for row, key in enumerate(map(tuple, (x[:, :4].float() * 2).round().tolist())):
        if (first := seen.setdefault(key, row)) != row:
            out[row] = out[first]
    return out
