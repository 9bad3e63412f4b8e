"""Gate and up product of an MLP with its activation for few tokens, on this package's kernels.

It uses the kernels of `linear`. Each program computes rows of both halves of the weight and stores
only the activated result. That saves a round trip through memory and a launch. PyTorch computes
product and activation for more than 64 tokens, or for more than one token if the kernels cannot
copy blocks (see `prepared`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import gelu, silu
from torch.nn.functional import linear as by_torch

from . import implementation
from .linear import (
    FEW_TOKENS,
    FEWEST_TOKENS,
    PROCESSORS,
    PRODUCT_CONDITIONS,
    Tile,
    of_one_row,
    of_rows,
    prepared,
)


def linear_silu_and_mul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(x @ gate.T) * (x @ up.T), with gate the first half of weight's rows and up the second.

    For up to 64 tokens, sum and activation are in fp32, rounded once. Not supported: float32,
    weights with non-contiguous rows.
    """
    return _gated(x, weight, "silu", silu)


def linear_gelu_tanh_and_mul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """gelu(x @ gate.T) * (x @ up.T) with the tanh approximation; otherwise like the op for silu."""
    return _gated(x, weight, "gelu_tanh", lambda gate: gelu(gate, approximate="tanh"))


def _gated(
    x: torch.Tensor,
    weight: torch.Tensor,
    name: str,
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Compute the op; `name` selects the activation in the kernels."""
    tokens, outputs = len(x), len(weight) // 2
    ready = prepared(x, weight)
    if ready is None:
        gate, up = by_torch(x, weight).chunk(2, dim=1)
        return activation(gate) * up
    out = x.new_empty((tokens, outputs))
    if tokens == 1:
        of_one_row(ready, weight, None, out, gated=name)
    else:
        of_rows(ready, weight, None, out, _tile(outputs, tokens), gated=name)
    return out


def _tile(outputs: int, tokens: int) -> Tile:
    """Return the fastest tile for ten shapes of nine models on an H200 (2026-11-30).

    Blocks are smaller for more outputs, because then more programs share a multiprocessor, and all
    run at once.
    """
    if outputs <= 32 * PROCESSORS:
        return Tile(32, 256, 3)
    if tokens <= FEWEST_TOKENS:
        return Tile(32, 128, 3)
    if outputs <= 64 * PROCESSORS:
        return Tile(64, 128, 4)
    if outputs > 128 * PROCESSORS:
        return Tile(64, 64, 3)
    return Tile(64, 128, 3) if tokens <= FEW_TOKENS else Tile(64, 64, 4)


OPS = tuple(
    implementation(fn, *PRODUCT_CONDITIONS, own=True)
    for fn in (linear_silu_and_mul, linear_gelu_tanh_and_mul)
)
