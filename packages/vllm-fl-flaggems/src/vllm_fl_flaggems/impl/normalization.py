"""Normalisations, on FlagGems's Triton kernels."""

from __future__ import annotations

from typing import Any

import torch

from ..kernels import contiguous, launchable, power_of_two, warps
from ..loading import flag_gems
from . import implementation

LONGEST_ROW = 4096
"""Longer rows need kernels with a loop, which FlagGems tunes."""

MOST_ELEMENTS = 2**31 - 1
"""The kernel for rows up to `LONGEST_ROW` indexes a tensor with 32-bit integers."""


def rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y / sqrt(mean(y**2) + epsilon) * weight in fp32, rounded once, with y = x + residual.

    With a residual the kernel works in place on contiguous tensors. Not supported: no weight,
    `variance_size`.
    """
    if residual is None:
        return _norm(x, weight, epsilon)
    kernel = launchable("fused_add_rms_norm_kernel")
    if kernel is None:
        public = flag_gems().fused_add_rms_norm
        pair: tuple[torch.Tensor, torch.Tensor]
        pair = public(x, residual, x.shape[-1:], weight, epsilon)
        return pair
    x, residual = contiguous(x), contiguous(residual)
    _launch(kernel, (x, residual), weight, epsilon)
    return x, residual


def _norm(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    hidden = x.shape[-1]
    if x.numel() > MOST_ELEMENTS:
        parts = x.reshape(-1, hidden).split(MOST_ELEMENTS // hidden)
        return torch.cat([_norm(part, weight, epsilon) for part in parts]).view(x.shape)
    kernel = launchable("rms_norm_kernel") if hidden <= LONGEST_ROW else None
    if kernel is None:
        # `rms_norm` itself spends 10 of 43 µs of host time on bookkeeping for gradients.
        normed: torch.Tensor = flag_gems().rms_norm_forward(x, x.shape[-1:], weight, epsilon)[0]
        return normed
    x = contiguous(x)
    normed = x.new_empty(x.shape)
    # The kernel always writes this, for gradients.
    inverse = x.new_empty(x.shape[:-1], dtype=torch.float32)
    _launch(kernel, (normed, inverse, x), weight, epsilon)
    return normed


def _launch(
    kernel: Any,
    tensors: tuple[torch.Tensor, ...],
    weight: Any,  # never None: `takes` requires a tensor
    epsilon: float,
) -> None:
    """Launch a program per row. Both kernels expect the strides of two contiguous tensors."""
    hidden = weight.shape[0]
    rows = tensors[0].shape[:-1].numel()
    block = max(power_of_two(hidden), 1)
    strides = (hidden, 1, hidden, 1)
    with torch.cuda.device(weight.device):
        kernel[(rows,)](
            *tensors,
            weight.contiguous(),
            *strides,
            hidden,
            epsilon,
            block,
            num_warps=warps(block),
        )


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    epsilon: float,
) -> torch.Tensor:
    """(x - mean) / sqrt(variance + epsilon) * weight + bias in fp32, rounded once."""
    if not x.numel():  # not every device's driver may run an empty grid
        return x.new_empty(x.shape)
    hidden = x.shape[-1]
    name = "layer_norm_persistent_kernel" if hidden <= LONGEST_ROW else "layer_norm_loop_kernel"
    kernel = launchable(name)
    x = contiguous(x)
    if kernel is None:
        # The function also returns the mean and the deviation, for gradients. It tunes the kernels
        # again for each number of rows. That takes tenths of a second, in nearly every prefill of a
        # server.
        normed: torch.Tensor = flag_gems().layer_norm(x, x.shape[-1:], weight, bias, epsilon)[0]
        return normed
    rows = x.shape[:-1].numel()
    block = min(power_of_two(hidden), LONGEST_ROW)
    normed = x.new_empty(x.shape)
    # The kernels always write these, for gradients.
    mean, spread = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    weight, bias = (None if each is None else each.contiguous() for each in (weight, bias))
    with torch.cuda.device(x.device):
        kernel[(rows,)](
            x,
            normed,
            weight,
            bias,
            mean,
            spread,
            rows,
            hidden,
            epsilon,
            block,
            num_warps=warps(block),
        )
    return normed


OPS = (
    implementation(layer_norm),
    implementation(
        rms_norm,
        "weight is not None",
        "variance_size is None",
        consumes=frozenset({"x", "residual"}),
    ),
)
