"""Triton kernels of this package's own: what FlagGems has no kernel for.

Imports Triton, and is imported only where one of them is launched.
"""

from __future__ import annotations

import triton
from triton import language as tl

__all__ = ["qk_norm_rope_kernel", "reshape_and_cache_kernel"]


@triton.jit
def qk_norm_rope_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    table_ptr,
    positions_ptr,
    token_step,
    table_step,
    position_step,
    heads,
    all_heads,
    epsilon,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """One token's next GROUP query and key heads, in place; the first `heads` are queries.

    A head's features are held in two parts: those that rotate, and the rest. PAIRS and REST are
    the pairs of the one and the features of the other, made powers of two; REST may be 0.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    is_head = (head < all_heads)[:, None]
    is_query = (head < heads)[:, None]
    rows = qkv_ptr + token * token_step + head[:, None] * SIZE

    pair = tl.arange(0, PAIRS)
    is_pair = pair < HALF
    if INTERLEAVED:
        # Neighbours are loaded together, 16 bytes at a time, and parted in registers: loaded as
        # first and second ones, each element is an access of its own.
        turning = tl.arange(0, 2 * PAIRS)
        is_turning = turning < 2 * HALF
        here = is_head & is_turning[None, :]
        x = tl.load(rows + turning[None, :], mask=here, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (GROUP, PAIRS, 2)))
        q_both = tl.load(q_weight_ptr + turning, mask=is_turning, other=0.0).to(tl.float32)
        k_both = tl.load(k_weight_ptr + turning, mask=is_turning, other=0.0).to(tl.float32)
        q_first, q_second = tl.split(tl.reshape(q_both, (PAIRS, 2)))
        k_first, k_second = tl.split(tl.reshape(k_both, (PAIRS, 2)))
    else:
        here = is_head & is_pair[None, :]
        a = tl.load(rows + pair[None, :], mask=here, other=0.0).to(tl.float32)
        b = tl.load(rows + HALF + pair[None, :], mask=here, other=0.0).to(tl.float32)
        q_first = tl.load(q_weight_ptr + pair, mask=is_pair, other=0.0).to(tl.float32)
        k_first = tl.load(k_weight_ptr + pair, mask=is_pair, other=0.0).to(tl.float32)
        q_second = tl.load(q_weight_ptr + HALF + pair, mask=is_pair, other=0.0).to(tl.float32)
        k_second = tl.load(k_weight_ptr + HALF + pair, mask=is_pair, other=0.0).to(tl.float32)
    squares = tl.sum(a * a + b * b, axis=1)
    if REST > 0:
        beyond = 2 * HALF + tl.arange(0, REST)
        is_rest = beyond < SIZE
        there = is_head & is_rest[None, :]
        rest = tl.load(rows + beyond[None, :], mask=there, other=0.0).to(tl.float32)
        squares += tl.sum(rest * rest, axis=1)
    norm = (1.0 / tl.sqrt(squares / SIZE + epsilon))[:, None]

    position = tl.load(positions_ptr + token * position_step).to(tl.int64)
    row = table_ptr + position * table_step
    cos = tl.load(row + pair, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(row + HALF + pair, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    a = a * norm * tl.where(is_query, q_first[None, :], k_first[None, :])
    b = b * norm * tl.where(is_query, q_second[None, :], k_second[None, :])
    first, second = a * cos - b * sin, b * cos + a * sin

    # Threads may hold the same features twice: all have read before one of them writes.
    tl.debug_barrier()
    dtype = qkv_ptr.dtype.element_ty
    if INTERLEAVED:
        both = tl.reshape(tl.join(first, second), (GROUP, 2 * PAIRS))
        tl.store(rows + turning[None, :], both.to(dtype), mask=here)
    else:
        tl.store(rows + pair[None, :], first.to(dtype), mask=here)
        tl.store(rows + HALF + pair[None, :], second.to(dtype), mask=here)
    if REST > 0:
        q_rest = tl.load(q_weight_ptr + beyond, mask=is_rest, other=0.0).to(tl.float32)
        k_rest = tl.load(k_weight_ptr + beyond, mask=is_rest, other=0.0).to(tl.float32)
        rest = rest * norm * tl.where(is_query, q_rest[None, :], k_rest[None, :])
        tl.store(rows + beyond[None, :], rest.to(dtype), mask=there)


@triton.jit
def reshape_and_cache_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slots_ptr,
    key_token_step,
    key_head_step,
    value_token_step,
    value_head_step,
    key_block_step,
    key_slot_step,
    key_cache_head_step,
    value_block_step,
    value_slot_step,
    value_cache_head_step,
    block_size,
    heads,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """One token's next GROUP key and value heads into its slot; FEATURES is SIZE or more."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    block, within = slot // block_size, slot % block_size
    # In 64 bits: where heads lie before blocks, a step is a good part of the cache.
    head = (tl.program_id(1) * GROUP + tl.arange(0, GROUP)[:, None]).to(tl.int64)
    feature = tl.arange(0, FEATURES)[None, :]
    here = (head < heads) & (feature < SIZE) & (slot >= 0)

    key = tl.load(key_ptr + token * key_token_step + head * key_head_step + feature, mask=here)
    at = block * key_block_step + within * key_slot_step + head * key_cache_head_step
    tl.store(key_cache_ptr + at + feature, key, mask=here)

    value = tl.load(
        value_ptr + token * value_token_step + head * value_head_step + feature, mask=here
    )
    at = block * value_block_step + within * value_slot_step + head * value_cache_head_step
    tl.store(value_cache_ptr + at + feature, value, mask=here)
