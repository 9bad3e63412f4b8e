"""Linear layers' products for few tokens, on Triton kernels of this package's own.

Such a product reads each weight once, and how fast that goes decides. For more tokens PyTorch's own
is called, which is FlagGems's where its `mm` replaces ATen's.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear as by_torch

from vllm_fl import Availability, OpImpl

from ..kernels import CUDA
from ..loading import available, unsuitable
from . import DEFAULT

__all__ = ["MOST_TOKENS", "OPS", "linear", "supports_linear"]

MOST_TOKENS = 32
"""Beyond that PyTorch's product is the faster one, or as fast."""

HALVES = frozenset({torch.float16, torch.bfloat16})

ROWS_OF_A_PROGRAM = 64
"""Rows of the weight in one program, as in one instruction of Hopper's tensor cores."""

PROGRAMS = 132
"""How many programs such a device runs at once, one on each of its processors."""

ENOUGH, LONG = 64, 4096
"""So many programs keep the memory busy, if each has no more features than that."""

MOST_PARTS = 4


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias, summed in fp32 and rounded once.

    The sizes of blocks are those that were the fastest on an H200 at the shapes of Qwen3-8B and
    Qwen3-30B-A3B, whole and divided between two ranks. They depend on the shapes alone, so that
    equal calls have equal results.

    Args:
        x: (tokens, in_features), float16 or bfloat16, of any layout.
        weight: (out_features, in_features), of x's dtype, with rows in one piece.
        bias: (out_features,), of x's dtype, or None.

    Returns:
        (tokens, out_features), contiguous, of x's dtype.
    """
    tokens = x.shape[0]
    if not 0 < tokens <= MOST_TOKENS:
        return by_torch(x, weight, bias)
    out = x.new_empty((tokens, weight.shape[0]))
    x = x if x.stride(1) == 1 else x.contiguous()
    bias = None if bias is None else bias.contiguous()
    with torch.cuda.device(x.device):
        (_one_row if tokens == 1 else _rows)(x, weight, bias, out)
    return out


def _one_row(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    from ..triton_kernels import linear_of_one_row_kernel as kernel

    outputs, features = weight.shape
    rows, block, warps = _blocks(outputs)
    kernel[(-(-outputs // rows),)](
        x,
        weight,
        bias,
        out,
        outputs,
        features,
        weight.stride(0),
        rows,
        block,
        outputs % rows == 0,
        features % block == 0,
        num_warps=warps,
    )


def _blocks(outputs: int) -> tuple[int, int, int]:
    """(rows of the weight, features, warps) of a program, the fastest for one token."""
    if outputs < 5120:
        return 4, 512, 4
    if outputs < 16384:
        return 8, 256, 2
    return 16, 256, 4


def _rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    from ..triton_kernels import linear_kernel, sum_of_parts_kernel

    (tokens, outputs), features = out.shape, weight.shape[1]
    programs = -(-outputs // ROWS_OF_A_PROGRAM)
    parts = _parts(programs, features)
    block = 128
    # A whole number of blocks each; the last part may have fewer.
    each = -(-features // (parts * block)) * block
    sums = x.new_empty((parts, tokens, outputs), dtype=torch.float32) if parts > 1 else out
    linear_kernel[(programs, parts)](
        x,
        weight,
        bias,
        sums,
        tokens,
        outputs,
        features,
        x.stride(0),
        weight.stride(0),
        each,
        16 if tokens <= 16 else 32,
        ROWS_OF_A_PROGRAM,
        block,
        parts > 1,
        outputs % ROWS_OF_A_PROGRAM == 0,
        features % each == 0,
        # More blocks in flight leave a processor room for fewer programs.
        5 if programs <= PROGRAMS else 4 if programs <= 2 * PROGRAMS else 3,
        num_warps=4,
    )
    if parts > 1:
        size = 1024
        grid = (-(-out.numel() // size),)
        sum_of_parts_kernel[grid](sums, bias, out, out.numel(), outputs, parts, size, num_warps=4)


def _parts(programs: int, features: int) -> int:
    """Into how many parts the features are divided, whose sums are added up afterwards."""
    if programs >= ENOUGH and features <= LONG:
        return 1
    parts = 1
    while parts < MOST_PARTS and 2 * parts * programs <= PROGRAMS and features >= 1024 * parts:
        parts *= 2
    return parts


def supports_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Availability:
    """True, or why the kernels would fail, or read beyond a tensor."""
    reason = unsuitable("x", x, HALVES)
    if reason:
        return reason
    if x.device.type not in CUDA:
        return f"the kernels are launched through CUDA, and x is on {x.device}"
    if x.ndim != 2 or weight.ndim != 2 or weight.shape[1:] != x.shape[1:] or not x.shape[1]:
        return f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}"
    if weight.dtype != x.dtype or weight.device != x.device or weight.stride(1) != 1:
        return f"weight is {weight.dtype} on {weight.device}, of strides {weight.stride()}"
    if bias is None:
        return True
    fits = bias.dtype == x.dtype and bias.device == x.device and bias.shape == weight.shape[:1]
    return fits or f"bias is {bias.dtype} {tuple(bias.shape)} on {bias.device}"


OPS = (OpImpl("linear", *DEFAULT, linear, available=available, supports=supports_linear),)
