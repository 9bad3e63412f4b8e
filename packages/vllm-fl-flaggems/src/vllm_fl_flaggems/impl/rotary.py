"""Rotary position embedding, on FlagGems's Triton kernel."""

from __future__ import annotations

import math

import torch

from ..kernels import launchable, power_of_two, warps
from ..loading import flag_gems
from . import implementation

FEW_TOKENS = 512
"""Maximum number of tokens with several programs per token, see `_side_by_side`."""

SMALLEST_BLOCK = 16
"""Minimum block size of the kernel; features beyond the head are masked."""


def rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor,
    rotary_interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate the first 2 * cos.shape[-1] features of each head in fp32, rounded once.

    Positions outside the tables are not detected. Not supported: non-contiguous rows of the tables.
    """
    kernel = launchable("apply_rotary_pos_emb_kernel")
    if kernel is None:
        return _public(query, key, cos, sin, position_ids, rotary_interleaved)
    q, positions = query, position_ids
    k = q[:, :0] if key is None else key  # without a key, zero heads
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    rotary = 2 * cos.shape[-1]
    if rotary < q.shape[-1]:
        q_out[..., rotary:] = q[..., rotary:]
        k_out[..., rotary:] = k[..., rotary:]
    aside = _side_by_side(q, k)
    if aside > 1:
        positions = positions.unsqueeze(1).expand(-1, aside).reshape(-1)
    block = max(power_of_two(rotary), SMALLEST_BLOCK)
    with torch.cuda.device(q.device):
        kernel[(len(positions),)](
            q_out,
            k_out,
            q,
            k,
            cos,
            sin,
            positions,
            *_strides(q, aside),
            *_strides(k, aside),
            *_strides(q_out, aside),
            *_strides(k_out, aside),
            positions.stride(0),
            cos.stride(0),
            sin.stride(0),
            None,  # the sequence length, required only without positions
            q.shape[1] // aside,
            k.shape[1] // aside,
            rotary,
            block,
            rotary_interleaved,
            len(cos),
            num_warps=warps(block),
        )
    return q_out, None if key is None else k_out


def _public(
    query: torch.Tensor,
    key: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    rotary_interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call the public function, which requires two tensors and rotates whole heads."""
    if not len(query):  # not every device's driver may run an empty grid
        return query.clone(), None if key is None else key.clone()
    rotary = 2 * cos.shape[-1]
    # Without a key, rotate one query head again and ignore the result.
    both = (query, query[:, :1] if key is None else key)
    # Not in place, because a thread may read features that another thread has rotated already.
    turned = flag_gems().apply_rotary_pos_emb(
        *(x[..., :rotary] for x in both), cos, sin, positions, rotary_interleaved
    )
    if rotary < query.shape[-1]:
        turned = [
            torch.cat((part, x[..., rotary:]), dim=-1) for part, x in zip(turned, both, strict=True)
        ]
    q, k = (part.contiguous() for part in turned)  # they have the layouts of query and key
    return q, None if key is None else k


def _strides(x: torch.Tensor, aside: int) -> tuple[int, ...]:
    """Return the strides of rows (`aside` per token), heads and features."""
    if aside == 1:
        return x.stride()
    _, heads, head_size = x.shape
    return heads // aside * head_size, head_size, 1


def _side_by_side(q: torch.Tensor, k: torch.Tensor) -> int:
    """Return the number of rows that a token's heads are divided into, each with its own program.

    FlagGems's program rotates its heads in sequence, which takes at least 8 µs on an H200 for one
    row, and 2 to 6 µs for 8 rows. Many tokens fill the GPU with one row each. Tensors with gaps
    have one row, because more rows would need a copy.
    """
    if len(q) > FEW_TOKENS or not (q.is_contiguous() and k.is_contiguous()):
        return 1
    return math.gcd(q.shape[1], k.shape[1]) or 1


OPS = (implementation(rotary_embedding, "cos.stride(1) == 1 and sin.stride(1) == 1"),)
