"""Activations, on FlagGems's Triton kernels."""

from __future__ import annotations

from typing import Any

import torch

from ..kernels import launchable, warps
from ..loading import flag_gems
from . import implementation

TILE = 1024
"""Elements of a row per program: sixteen per thread, loaded with two of the widest instructions."""

GELU = {"none": "gelu_none_and_mul_kernel", "tanh": "gelu_tanh_and_mul_kernel"}
"""Approximation -> kernel."""


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(x[..., :d]) * x[..., d:] in fp32, rounded once."""
    return _silu_and_mul(x, gate_first=True)


def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu(x[..., :d]) * x[..., d:] in fp32, rounded once.

    An unknown `approximate` raises ValueError.
    """
    kernel = launchable(GELU[approximate]) if approximate in GELU else None
    return _public_gelu_and_mul(x, approximate) if kernel is None else _launch(kernel, x)


def mul_and_silu(x: torch.Tensor) -> torch.Tensor:
    """x[..., :d] * silu(x[..., d:]) in fp32, rounded once: `silu_and_mul` of the swapped halves."""
    return _silu_and_mul(x, gate_first=False)


def _launch(kernel: Any, x: torch.Tensor, gate_first: bool = True) -> torch.Tensor:
    half = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], half))
    rows = x.shape[:-1].numel()
    first = x if x.ndim == 2 else x.reshape(rows, 2 * half)
    step, side = first.stride()
    second = first[:, half:]
    gate, other = (first, second) if gate_first else (second, first)
    with torch.cuda.device(x.device):
        kernel[(rows * -(-half // TILE),)](
            gate,
            other,
            out,
            *(step, side),  # of the gate
            *(step, side),  # of the other half
            *(half, 1),  # of the result
            *(rows, half),
            rows * half,
            1,  # tiles of a program
            1,  # rows of a tile
            TILE,
            True,  # no loop over tiles
            num_warps=warps(TILE),
        )
    return out


def _silu_and_mul(x: torch.Tensor, gate_first: bool) -> torch.Tensor:
    kernel = launchable("silu_and_mul_kernel")
    if kernel is not None:
        return _launch(kernel, x, gate_first)
    half = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], half))
    first, second = x[..., :half], x[..., half:]
    gate, other = (first, second) if gate_first else (second, first)
    flag_gems().silu_and_mul_out(gate, other, out)
    return out


def _public_gelu_and_mul(x: torch.Tensor, approximate: str) -> torch.Tensor:
    half = x.shape[-1] // 2
    out: torch.Tensor = flag_gems().gelu_and_mul(x[..., :half], x[..., half:], approximate)
    return out.contiguous()


OPS = tuple(map(implementation, (silu_and_mul, gelu_and_mul, mul_and_silu)))
