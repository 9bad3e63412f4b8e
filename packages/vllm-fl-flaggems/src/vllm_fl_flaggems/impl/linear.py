"""Linear layers' products for few tokens, on Triton kernels of this package's own.

Such a product reads each weight once, and how fast that goes decides. For more tokens PyTorch's own
is called, which is FlagGems's where its `mm` replaces ATen's; and for two tokens and more
where its product is the faster one, where rows do not begin at multiples of 16 bytes, or the GPU
is older than Hopper.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear as by_torch

from ..kernels import power_of_two
from . import implementation

__all__ = [
    "ALIGNED",
    "MOST_TOKENS",
    "PRODUCT",
    "OPS",
    "Scales",
    "Tile",
    "begins_early",
    "copies_blocks",
    "is_aligned",
    "linear",
    "of_one_row",
    "of_rows",
    "prepared",
]

MOST_TOKENS = 64
"""Beyond that PyTorch's product is the faster one, or as fast."""


ROWS = 64
"""Of the weight, which one instruction of Hopper's tensor cores takes, and a program has."""

FEWEST_TOKENS = 16
"""As few as an instruction of the tensor cores takes; blocks are longer for them."""

LINES = 4
"""Of 128 bytes of each row of the weight, which a program has brought to L2 before it waits."""

PROCESSORS, SHARED_BYTES = 132, 227 * 1024
"""A Hopper GPU's multiprocessors, and the shared memory that a program may have there."""

FEW_TOKENS = 32

ALIGNED = 16
"""Bytes: where tensors and their rows must begin for Hopper's copies of blocks."""


class Tile(NamedTuple):
    """What a program of several tokens takes.

    Args:
        rows: of the weight; of a gated product, of each of its parts.
        features: of a block.
        stages: how many blocks are in flight.
    """

    rows: int
    features: int
    stages: int


class Scales(NamedTuple):
    """Of numbers in 8 bits: float32, contiguous, each one number or one for each row.

    Args:
        x: of the tokens.
        weight: of the outputs.
    """

    x: torch.Tensor
    weight: torch.Tensor


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias, summed in fp32 and rounded once.

    The sizes of blocks are those that were the fastest at the shapes of Qwen3-8B: for up to 16
    tokens on an H100, for more on an H200, there at Qwen3-30B-A3B's and at those of two ranks as
    well. They, and who computes, depend on the shapes alone, so that equal calls have equal
    results.

    Args:
        x: (tokens, in_features), float16 or bfloat16, of any layout.
        weight: (out_features, in_features), of x's dtype, with rows in one piece.
        bias: (out_features,), of x's dtype, or None.

    Returns:
        (tokens, out_features), contiguous, of x's dtype.
    """
    tokens, outputs = len(x), len(weight)
    ready = prepared(x, weight)
    if ready is None or (tokens > 1 and not _is_faster(tokens, *weight.shape)):
        return by_torch(x, weight, bias)
    out = x.new_empty((tokens, outputs))
    bias = None if bias is None else bias.contiguous()
    if tokens == 1:
        of_one_row(ready, weight, bias, out)
    else:
        of_rows(ready, weight, bias, out, _tile(outputs, tokens))
    return out


def prepared(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """x as the kernels take it; None where they cannot compute the product."""
    if not 0 < len(x) <= MOST_TOKENS:
        return None
    plain = x if x.stride(1) == 1 and is_aligned(x) else x.contiguous()
    in_blocks = copies_blocks(x.device) and is_aligned(plain) and is_aligned(weight)
    return plain if in_blocks or len(x) == 1 else None


@cache
def copies_blocks(device: torch.device) -> bool:
    """Whether it is a Hopper GPU or a later one, whose copies the kernel for several tokens needs.

    Elsewhere Triton would load the blocks one after the other. The interpreter knows them, too.
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9


def _is_faster(tokens: int, outputs: int, features: int) -> bool:
    """Whether the kernel takes no longer than PyTorch's for two tokens and more.

    So it was on an H100 at 41 shapes of nine models' layers, but for 2 to 5 % at a few narrow ones
    (2026-11-27). A program reads all features of 64 outputs. cuBLAS divides the features where the
    outputs are few and the way is long, and has smaller tiles where the tokens are many: then it
    wins.
    """
    programs = -(-outputs // ROWS)
    if tokens > FEW_TOKENS:
        long = 4096 if programs <= 64 else 8192
        return programs >= 112 or (programs >= 48 and features >= long)
    if programs < 40 and features > 4096:
        return False
    return tokens <= FEWEST_TOKENS or programs > 64 or features >= 4096


def is_aligned(matrix: torch.Tensor) -> bool:
    """Whether each row begins where the copies of blocks may."""
    step = matrix.stride(0) * matrix.itemsize
    return matrix.data_ptr() % ALIGNED == 0 and step % ALIGNED == 0


def begins_early(device: torch.device) -> bool:
    """Whether products begin while the kernel before them ends: where Inductor's kernels do.

    Alone they would lose. On an H100 the layers of Qwen3-8B without attention took 4 % less for one
    token where all their kernels began early, and 1.5 % more where the products alone did.
    """
    if device.type != "cuda" or not copies_blocks(device):
        return False
    from torch._inductor import config

    return bool(getattr(config.triton, "enable_pdl", False))  # older releases have none


def _early(device: torch.device) -> dict[str, Any]:
    """What a kernel is launched with, so that it begins early or behind the one before it."""
    return {"EARLY": LINES, "launch_pdl": True} if begins_early(device) else {"EARLY": 0}


def of_one_row(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    scales: Scales | None = None,
    warps: int = 4,
    gated: str = "",
) -> None:
    """Write the product of one token into `out`; of numbers in 8 bits, by their scales; or, gated,
    the activation of its first half times the second: `silu` or `gelu_tanh`."""
    from ..triton_kernels import linear_of_one_row_kernel as kernel

    outputs, features = out.shape[1], weight.shape[1]
    rows, block = 2, 1024  # the fastest for every number of outputs
    of_x, of_weight = scales or (None, None)
    with torch.cuda.device(x.device):
        kernel[(-(-len(weight) // rows),)](
            x,
            weight,
            bias,
            of_x,
            of_weight,
            out,
            outputs,
            features,
            weight.stride(0),
            rows,
            block,
            len(weight) % rows == 0,
            features % block == 0,
            of_weight is not None and of_weight.numel() > 1,
            GATED=gated,
            num_warps=warps,
            **_early(x.device),
        )


def of_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile,
    scales: Scales | None = None,
    gated: str = "",
) -> None:
    """Write the product of a few tokens into `out`; of numbers in 8 bits, by their scales; or,
    gated, the activation of its first half times the second.

    Args:
        x, weight, bias, out, scales: rows of x and weight begin where copies of blocks may.
        tile: what a program takes.
        gated: the activation, `silu` or `gelu_tanh`, of a weight that has two parts.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    from ..triton_kernels import linear_kernel

    (tokens, outputs), features = out.shape, weight.shape[1]
    held, size = _held(tokens), tile.features
    of_x, of_weight = scales or (None, None)
    in_flight = size * (tile.rows * (2 if gated else 1) + held) * x.itemsize
    with torch.cuda.device(x.device):
        linear_kernel[(-(-outputs // tile.rows),)](
            TensorDescriptor.from_tensor(x, [held, size]),
            TensorDescriptor.from_tensor(weight, [tile.rows, size]),
            weight,
            bias,
            of_x,
            of_weight,
            out,
            tokens,
            outputs,
            features,
            weight.stride(0),
            held,
            tile.rows,
            size,
            min(tile.stages, _most_stages(x.device, in_flight)),
            of_x is not None and of_x.numel() > 1,
            of_weight is not None and of_weight.numel() > 1,
            GATED=gated,
            num_warps=4,
            **_early(x.device),
        )


def _held(tokens: int) -> int:
    """How many tokens a program holds."""
    return max(FEWEST_TOKENS, power_of_two(tokens))


def _tile(outputs: int, tokens: int) -> Tile:
    """The fastest tile of a product, on an H100 (2026-11-27).

    For few tokens blocks are twice as long. For more as many of them are in flight as a
    multiprocessor's memory holds, or, where there are more programs than multiprocessors, three, so
    that several programs share one.
    """
    if tokens <= FEWEST_TOKENS:
        return Tile(ROWS, 256, 4)
    shares = tokens <= FEW_TOKENS and outputs > ROWS * PROCESSORS
    return Tile(ROWS, 128, 3 if shares else 6)


@cache
def _most_stages(device: torch.device, size: int) -> int:
    """How many blocks of so many bytes the shared memory of a device's processor holds."""
    held = SHARED_BYTES
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        held = properties.shared_memory_per_block_optin
    barriers = 1024
    return max(1, (held - barriers) // size)


PRODUCT = ("x.dtype != torch.float32", "weight.stride(1) == 1")
"""The calls that the kernels of products support."""

OPS = (implementation(linear, *PRODUCT, own=True),)
