"""Linear layers' products for few tokens, on this package's Triton kernels.

Such a product reads each weight once, so memory bandwidth limits it. PyTorch (or FlagGems, if it
replaces `mm` in ATen) computes products of more than 64 tokens. It also computes products of
several tokens if it is faster, if rows do not begin at multiples of 16 bytes, or on a GPU older
than Hopper.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear as by_torch

from ..kernels import power_of_two
from . import implementation

MOST_TOKENS = 64
"""Maximum number of tokens. For more tokens, PyTorch's product is as fast or faster."""

WEIGHT_ROWS = 64
"""Weight rows per program: the number that one tensor core instruction on Hopper multiplies."""

FEWEST_TOKENS = 16
"""Minimum number of tokens of a tensor core instruction. Up to this number, blocks are longer."""

LINES = 4
"""Number of 128-byte lines of each weight row that a program prefetches to L2 before it waits."""

PROCESSORS, SHARED_BYTES = 132, 227 * 1024
"""Multiprocessors of a Hopper GPU, and the shared memory available to a program there."""

FEW_TOKENS = 32

NARROW = {2: 2048, 1: 2560}
"""Largest number of outputs of a product that needs smaller programs for one token, by the bytes of
a number."""

COPY_ALIGN = 16
"""Required alignment, in bytes, of tensors and of their rows for block copies on Hopper."""


class Tile(NamedTuple):
    """Tile of a program for several tokens.

    Args:
        rows: weight rows; in a gated product, of each half.
        features: features of a block.
        stages: blocks in flight.
    """

    rows: int
    features: int
    stages: int


class Scales(NamedTuple):
    """Scales of 8-bit numbers: float32, contiguous, one number or one per row."""

    x: torch.Tensor
    weight: torch.Tensor


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias, summed in fp32 and rounded once.

    Block size and choice of kernel depend only on shapes, so equal calls have equal results. Not
    supported: float32, weights with non-contiguous rows.
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
    """Return x in a layout that the kernels support; None if they cannot compute the product."""
    if not 0 < len(x) <= MOST_TOKENS:
        return None
    plain = x if x.stride(1) == 1 and is_aligned(x) else x.contiguous()
    in_blocks = copies_blocks(x.device) and is_aligned(plain) and is_aligned(weight)
    return plain if in_blocks or len(x) == 1 else None


@cache
def copies_blocks(device: torch.device) -> bool:
    """Return whether the kernel for several tokens can copy blocks: on Hopper and later GPUs.

    Elsewhere Triton would load the blocks one after the other. Its interpreter supports them.
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9


def _is_faster(tokens: int, outputs: int, features: int) -> bool:
    """Return whether the kernel is as fast as PyTorch for two or more tokens.

    Measured on an H200 at 29 shapes of nine models (2026-11-30), and up to 32 tokens on an H100 at
    41 shapes (2026-11-27). At a few narrow shapes, a wrong choice costs 2 to 6 %. A program reads
    all features of 64 outputs. cuBLAS is faster if it can split many features over few outputs,
    and for many tokens, because of its smaller tiles.
    """
    programs = -(-outputs // WEIGHT_ROWS)
    if tokens > FEW_TOKENS:
        return programs >= 96 or (programs >= 64 and features >= 8192)
    if programs <= 40 and features > 4096:
        return False
    return tokens <= FEWEST_TOKENS or programs > 64 or features >= 4096


def is_aligned(matrix: torch.Tensor) -> bool:
    """Return whether all rows begin at addresses that block copies support."""
    step = matrix.stride(0) * matrix.itemsize
    return matrix.data_ptr() % COPY_ALIGN == 0 and step % COPY_ALIGN == 0


def begins_early(device: torch.device) -> bool:
    """Return whether products begin before the previous kernel has ended, as Inductor's kernels
    may.

    If only the products do, they are slower. On an H100, the layers of Qwen3-8B without attention
    took 4 % less time for one token if all kernels began early, and 1.5 % more if only the products
    did.
    """
    if device.type != "cuda" or not copies_blocks(device):
        return False
    from torch._inductor import config

    return bool(getattr(config.triton, "enable_pdl", False))  # missing in older releases


def _early(device: torch.device) -> dict[str, Any]:
    """Return the launch options for `begins_early`."""
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
    """Write the product of one token into `out`.

    `scales` are for 8-bit numbers. If gated ("silu" or "gelu_tanh"), write the activation of the
    product's first half times the second half.
    """
    from ..triton_kernels import linear_of_one_row_kernel as kernel

    outputs, features = out.shape[1], weight.shape[1]
    # The fastest on an H200 at 38 shapes, and at 18 for 8-bit numbers (2026-11-30).
    rows, block = (4, 512) if outputs > NARROW[weight.itemsize] else (2, 1024)
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
    """Write the product of a few tokens into `out`, see `of_one_row`.

    Rows of x and weight must be aligned (`is_aligned`).
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
    """Return the number of tokens in a program's block."""
    return max(FEWEST_TOKENS, power_of_two(tokens))


def _tile(outputs: int, tokens: int) -> Tile:
    """Return the fastest tile of a product on an H100 (2026-11-27).

    Blocks are twice as long for few tokens. For more tokens, as many blocks are in flight as fit
    into a multiprocessor's memory, but only three if several programs have to share a
    multiprocessor.
    """
    if tokens <= FEWEST_TOKENS:
        return Tile(WEIGHT_ROWS, 256, 4)
    shares = tokens <= FEW_TOKENS and outputs > WEIGHT_ROWS * PROCESSORS
    return Tile(WEIGHT_ROWS, 128, 3 if shares else 6)


@cache
def _most_stages(device: torch.device, size: int) -> int:
    """Return how many blocks of `size` bytes fit into the device's shared memory."""
    held = SHARED_BYTES
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        held = properties.shared_memory_per_block_optin
    barriers = 1024
    return max(1, (held - barriers) // size)


PRODUCT_CONDITIONS = ("x.dtype != torch.float32", "weight.stride(1) == 1")
"""Conditions for calls that the product kernels support."""

OPS = (implementation(linear, *PRODUCT_CONDITIONS, own=True),)
