"""Triton kernels of this package, for ops that FlagGems has no kernel for.

Imports Triton, so it is imported only when a kernel is launched.
"""

from __future__ import annotations

import triton
from triton import language as tl


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
    """Normalise and rotate a token's next GROUP heads in place; the first `heads` are queries.

    A head's features are in two parts: rotated pairs (PAIRS, a power of two) and the other features
    (REST, a power of two or 0).
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    is_head = (head < all_heads)[:, None]
    is_query = (head < heads)[:, None]
    rows = qkv_ptr + token * token_step + head[:, None] * SIZE

    pair = tl.arange(0, PAIRS)
    is_pair = pair < HALF
    if INTERLEAVED:
        # Load pairs together, 16 bytes at a time, and split them in registers. Separate loads of
        # first and second elements would access single elements.
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
    # CUDA graph launches pass a Python number as fp64, hence the cast.
    norm = (1.0 / tl.sqrt(squares / SIZE + tl.cast(epsilon, tl.float32)))[:, None]

    position = tl.load(positions_ptr + token * position_step).to(tl.int64)
    row = table_ptr + position * table_step
    cos = tl.load(row + pair, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(row + HALF + pair, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    a = a * norm * tl.where(is_query, q_first[None, :], k_first[None, :])
    b = b * norm * tl.where(is_query, q_second[None, :], k_second[None, :])
    first, second = a * cos - b * sin, b * cos + a * sin

    # Several threads may hold the same features, so all must read before one writes.
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


@triton.jit(do_not_specialize=["block_size", "heads"])
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
    """Write a token's next GROUP keys and values into its slot; FEATURES is at least SIZE."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    block, within = slot // block_size, slot % block_size
    # 64-bit: in layouts with heads before blocks, a head's stride is a large part of the cache.
    head = (tl.program_id(1) * GROUP + tl.arange(0, GROUP)[:, None]).to(tl.int64)
    feature = tl.arange(0, FEATURES)[None, :]
    here = (head < heads) & (feature < SIZE)

    # Do not wait for the slot: a token without a slot is read, but not written.
    key = tl.load(key_ptr + token * key_token_step + head * key_head_step + feature, mask=here)
    value = tl.load(
        value_ptr + token * value_token_step + head * value_head_step + feature, mask=here
    )
    here = here & (slot >= 0)
    at = block * key_block_step + within * key_slot_step + head * key_cache_head_step
    tl.store(key_cache_ptr + at + feature, key, mask=here)
    at = block * value_block_step + within * value_slot_step + head * value_cache_head_step
    tl.store(value_cache_ptr + at + feature, value, mask=here)


@triton.jit
def linear_of_one_row_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    x_scale_ptr,
    weight_scale_ptr,
    out_ptr,
    outputs,
    features,
    weight_step,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    WHOLE_BLOCKS: tl.constexpr,
    PER_OUTPUT: tl.constexpr,
    EARLY: tl.constexpr,
    GATED: tl.constexpr,
):
    """Multiply one token by the next ROWS rows of the weight, BLOCK features at a time.

    8-bit numbers have scales: one for the token, and one for the weight or, if PER_OUTPUT, for each
    of its rows.

    If GATED by an activation, the weight has `outputs` rows of gates, then `outputs` of ups. The
    program's ROWS alternate between both, and the result is activation(gate) * up, without scales
    or a bias.
    """
    PARTS: tl.constexpr = 2 if GATED != "" else 1
    number = tl.arange(0, ROWS)
    output = tl.program_id(0) * (ROWS // PARTS) + number // PARTS
    is_row = output < outputs
    row = output + (number % PARTS) * outputs
    feature = tl.arange(0, BLOCK)
    rows = weight_ptr + row.to(tl.int64)[:, None] * weight_step
    if EARLY > 0:
        _begin_early(weight_ptr, tl.minimum(row, PARTS * outputs - 1), weight_step, features, EARLY)
    products = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in tl.range(0, features, BLOCK, num_stages=3):
        at = start + feature
        if WHOLE_ROWS and WHOLE_BLOCKS:
            w = tl.load(rows + at[None, :], eviction_policy="evict_first")
            x = tl.load(x_ptr + at)
        else:
            is_feature = at < features
            here = is_row[:, None] & is_feature[None, :]
            w = tl.load(rows + at[None, :], mask=here, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + at, mask=is_feature, other=0.0)
        products += w.to(tl.float32) * x.to(tl.float32)[None, :]
    total = tl.sum(products, axis=1)
    if x_scale_ptr is not None:
        total *= tl.load(x_scale_ptr) * _scales(weight_scale_ptr, row, outputs, PER_OUTPUT)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)
    if GATED != "":
        gate, up = tl.split(tl.reshape(total, (ROWS // 2, 2)))
        total = _activated(gate, up, GATED)
        row = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
        is_row = row < outputs
    tl.store(out_ptr + row, total.to(out_ptr.dtype.element_ty), mask=is_row)


@triton.jit
def _activated(gate, up, ACTIVATION: tl.constexpr):
    """Return gate * sigmoid(inner) * up; gelu_tanh uses (1 + tanh(z)) / 2 = sigmoid(2 * z)."""
    inner = gate
    if ACTIVATION == "gelu_tanh":
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 * sqrt(2 / pi)
    return gate / (1.0 + tl.exp(-inner)) * up


@triton.jit
def _begin_early(weight_ptr, rows, weight_step, features, LINES: tl.constexpr):
    """Prefetch LINES * 128 bytes of each of these rows to L2, then wait for the previous kernel.

    Before the wait, do not write, and do not read results of other kernels. Do not let the next
    kernel start before the wait: kernels of Inductor only wait for their predecessor, and assume
    that all earlier kernels have finished.
    """
    line: tl.constexpr = 128 * 8 // weight_ptr.dtype.element_ty.primitive_bitwidth
    feature = tl.minimum(tl.arange(0, LINES) * line, features - 1)
    places = weight_ptr + rows.to(tl.int64)[:, None] * weight_step + feature[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [places],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=["tokens"])
def linear_kernel(
    x,
    weight,
    weight_ptr,
    bias_ptr,
    x_scale_ptr,
    weight_scale_ptr,
    out_ptr,
    tokens,
    outputs,
    features,
    weight_step,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    PER_OUTPUT: tl.constexpr,
    EARLY: tl.constexpr,
    GATED: tl.constexpr,
):
    """Compute the next ROWS outputs of all tokens, at most TOKENS.

    x and weight are tensor descriptors of blocks with TOKENS and ROWS rows; reads beyond the
    matrices give zeros. weight_ptr is the address of the weight. The weight is the left factor,
    because it has enough rows for a tensor core instruction, unlike a few tokens.

    8-bit numbers have scales: one for x or, if PER_TOKEN, for each of its rows; one for the weight
    or, if PER_OUTPUT, for each of its rows.

    If GATED by an activation, the weight has `outputs` rows of gates, then `outputs` of ups, and
    the result is activation(gate) * up, without scales or a bias. The tokens are the left factor
    then, because a block then needs only half as many rows of each part.
    """
    row = tl.program_id(0) * ROWS
    rows = row + tl.arange(0, ROWS)
    if EARLY > 0:
        _begin_early(weight_ptr, tl.minimum(rows, outputs - 1), weight_step, features, EARLY)
    if GATED != "":
        total = tl.zeros((TOKENS, ROWS), dtype=tl.float32)
        other = total
    else:
        total = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
    for start in tl.range(0, features, BLOCK, num_stages=STAGES):
        of_tokens = x.load([0, start])
        of_rows = weight.load([row, start])
        if GATED != "":
            total = tl.dot(of_tokens, tl.trans(of_rows), total)
            other = tl.dot(of_tokens, tl.trans(weight.load([outputs + row, start])), other)
        else:
            total = tl.dot(of_rows, tl.trans(of_tokens), total)
    # Store with tokens first, like the result; otherwise each number would be a separate access.
    total = _activated(total, other, GATED) if GATED != "" else tl.trans(total)
    token = tl.arange(0, TOKENS)
    is_row = rows < outputs
    if x_scale_ptr is not None:
        total *= _scales(weight_scale_ptr, rows, outputs, PER_OUTPUT)[None, :]
        total *= _scales(x_scale_ptr, token, tokens, PER_TOKEN)[:, None]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)[None, :]
    place = token.to(tl.int64)[:, None] * outputs + rows[None, :]
    here = (token < tokens)[:, None] & is_row[None, :]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=here)


@triton.jit
def _scales(scale_ptr, at, count, EACH: tl.constexpr):
    """Load the scales of rows `at` of `count` rows: one per row if EACH, otherwise one for all."""
    return tl.load(scale_ptr + (at if EACH else at * 0), mask=at < count, other=0.0)


@triton.jit
def _expert_of(ids_ptr, map_ptr, pair, known):
    """Return the index of a pair's expert in the weights, int64; -1 if it is not on this rank."""
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    is_known = (expert >= 0) & (expert < known)
    if map_ptr is not None:
        expert = tl.load(map_ptr + expert, mask=is_known, other=-1).to(tl.int64)
    return tl.where(is_known, expert, -1)


@triton.jit(do_not_specialize=["k", "known"])
def experts_inner_kernel(
    x_ptr,
    w13_ptr,
    ids_ptr,
    map_ptr,
    inner_ptr,
    k,
    known,
    width,
    features,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Compute the next ROWS of an expert's `width` activated features, for one token.

    A pair is a token and one of its k experts. `known` is the number of ids. The result of a pair
    without an expert on this rank is not written.
    """
    parts = tl.cdiv(width, ROWS)
    pair = (tl.program_id(0) // parts).to(tl.int64)
    expert = _expert_of(ids_ptr, map_ptr, pair, known)
    if expert >= 0:
        row = tl.program_id(0) % parts * ROWS + tl.arange(0, ROWS)
        is_row = row < width
        gate_rows = w13_ptr + (expert * 2 * width + row)[:, None] * features
        up_rows = w13_ptr + (expert * 2 * width + width + row)[:, None] * features
        feature = tl.arange(0, BLOCK)
        gates = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        ups = gates
        for start in tl.range(0, features, BLOCK, num_stages=3):
            at = start + feature
            is_feature = at < features
            x = tl.load(x_ptr + pair // k * features + at, mask=is_feature, other=0.0)
            x = x.to(tl.float32)[None, :]
            if WHOLE:
                gate, up = tl.load(gate_rows + at[None, :]), tl.load(up_rows + at[None, :])
            else:
                here = is_row[:, None] & is_feature[None, :]
                gate = tl.load(gate_rows + at[None, :], mask=here, other=0.0)
                up = tl.load(up_rows + at[None, :], mask=here, other=0.0)
            gates += gate.to(tl.float32) * x
            ups += up.to(tl.float32) * x
        inner = _activated(tl.sum(gates, axis=1), tl.sum(ups, axis=1), "silu")
        tl.store(inner_ptr + pair * width + row, inner, mask=is_row)


@triton.jit(do_not_specialize=["k", "known"])
def experts_outer_kernel(
    inner_ptr,
    w2_ptr,
    weights_ptr,
    ids_ptr,
    map_ptr,
    out_ptr,
    k,
    known,
    width,
    features,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the next ROWS features of one token over its experts, in the order of its pairs."""
    parts = tl.cdiv(features, ROWS)
    token = (tl.program_id(0) // parts).to(tl.int64)
    row = tl.program_id(0) % parts * ROWS + tl.arange(0, ROWS)
    is_row = row < features
    within = tl.arange(0, BLOCK)
    blocks = tl.cdiv(width, BLOCK)
    products = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for step in tl.range(0, k * blocks, num_stages=3):
        pair = token * k + step // blocks
        at = step % blocks * BLOCK + within
        expert = _expert_of(ids_ptr, map_ptr, pair, known)
        here = (at < width) & (expert >= 0)
        weight = tl.load(weights_ptr + pair, mask=expert >= 0, other=0.0).to(tl.float32)
        inner = tl.load(inner_ptr + pair * width + at, mask=here, other=0.0) * weight
        rows = w2_ptr + (expert * features + row)[:, None] * width + at[None, :]
        w2 = tl.load(rows, mask=is_row[:, None] & here[None, :], other=0.0)
        products += w2.to(tl.float32) * inner[None, :]
    total = tl.sum(products, axis=1).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * features + row, total, mask=is_row)


@triton.jit
def added(top, total, values, its_top, its_total, its):
    """Add two parts of a softmax: maxima in powers of two, sums of weights, weighted values."""
    most = tl.maximum(tl.maximum(top, its_top), -3e38)  # finite without any token
    weight, fade = tl.exp2(its_top - most), tl.exp2(top - most)
    return most, total * fade + its_total * weight, values * fade[:, None] + its * weight[:, None]


@triton.jit(do_not_specialize=["count"])
def decode_attention_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    cache_ptr,
    table_ptr,
    lengths_ptr,
    slots_ptr,
    out_ptr,
    parts_ptr,
    arrived_ptr,
    scale,
    count,
    query_step,
    key_step,
    value_step,
    out_step,
    table_step,
    block_step,
    head_step,
    token_step,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FAN: tl.constexpr,
):
    """Attend to `count` sequences with one new token each, and write its key and value.

    Args:
        key_ptr, value_ptr: of the new tokens. A cache row has SIZE features of a key, then its
            value.
        slots_ptr: the new tokens' places in the cache; not written below 0.
        lengths_ptr: tokens of the sequences with the new one. The result of a length of 0 is 0.
        parts_ptr: (heads, PROGRAMS, 2, GROUP * (SIZE + 2)) in float32, for sequences that several
            programs share: maxima, sums of weights, weighted values.
        arrived_ptr: (levels, heads, PROGRAMS, 2), parts that were written; 0 before and after.
        scale: in powers of two.

    The programs of a key head share the tiles of all its sequences equally, so one long sequence
    keeps as many of them busy as many short ones. If no sequence has more than four tiles, a
    program gets at least as many as the longest has. The last of each FAN programs of a sequence to
    arrive adds up their parts to one part of the next level, until one part is left.
    """
    head, program, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    number = tl.arange(0, COUNT)
    is_sequence = number < count
    older = tl.maximum(tl.load(lengths_ptr + number, mask=is_sequence, other=0) - 1, 0)
    tiles = tl.where(is_sequence, tl.maximum(tl.cdiv(older, TILE), 1), 0)
    ends = tl.cumsum(tiles, 0)
    all_tiles = tl.sum(tiles, 0)
    longest = tl.max(tiles, 0)
    each = tl.maximum(tl.cdiv(all_tiles, PROGRAMS), tl.where(longest <= 4, longest, 2))
    tile = program * each
    stop = tl.minimum(tile + each, all_tiles)
    row, feature, step = tl.arange(0, ROWS), tl.arange(0, SIZE), tl.arange(0, TILE)
    is_row = row < GROUP
    heads_at = (head * GROUP + row)[:, None] * SIZE + feature[None, :]
    own, head_at = head * SIZE + feature, head.to(tl.int64) * head_step
    parts = parts_ptr + head * PROGRAMS * 2 * GROUP * (SIZE + 2)
    values_at = 2 * GROUP + row[:, None] * SIZE + feature[None, :]
    while tile < stop:
        sequence = tl.sum((ends <= tile).to(tl.int32), 0)
        end = tl.sum(tl.where(number == sequence, ends, 0), 0)
        first = end - tl.sum(tl.where(number == sequence, tiles, 0), 0)
        length = tl.load(lengths_ptr + sequence)
        until = tl.minimum(stop, end)
        is_last = until == end
        begin = (tile - first) * TILE
        limit = tl.minimum((until - first) * TILE, tl.maximum(length - 1, 0))
        pages = table_ptr + sequence * table_step
        page = tl.load(pages + (begin + step) // BLOCK, mask=begin + step < limit, other=0)
        page = page.to(tl.int64)
        q = tl.load(query_ptr + sequence * query_step + heads_at, mask=is_row[:, None], other=0.0)
        new_key = tl.load(key_ptr + sequence * key_step + own)
        new_value = tl.load(value_ptr + sequence * value_step + own)
        slot = tl.load(slots_ptr + sequence)
        block = (length - 1) // BLOCK
        if (COUNT > 1) & is_last & (block > 0) & (length - 1 == block * BLOCK):
            # With its prefix cache vLLM may give a sequence a block that another sequence of this
            # step completes. Its program may not have written the last token yet.
            last = tl.load(pages + block - 1).to(tl.int64) * BLOCK + BLOCK - 1
            slots = tl.load(slots_ptr + number, mask=is_sequence, other=-1)
            other = tl.sum(tl.where(slots == last, number + 1, 0), 0) - 1
            if other >= 0:
                place = last // BLOCK * block_step + head_at + (BLOCK - 1) * token_step
                tl.store(cache_ptr + place + feature, tl.load(key_ptr + other * key_step + own))
                theirs = tl.load(value_ptr + other * value_step + own)
                tl.store(cache_ptr + place + SIZE + feature, theirs)
                tl.debug_barrier()
        top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((ROWS,), dtype=tl.float32)
        values = tl.zeros((ROWS, SIZE), dtype=tl.float32)
        for start in range(begin, limit, TILE):
            real = start + step < limit
            place = page * block_step + head_at + (start + step) % BLOCK * token_step
            at = place[:, None] + feature[None, :]
            k = tl.load(cache_ptr + at, mask=real[:, None], other=0.0)
            v = tl.load(cache_ptr + SIZE + at, mask=real[:, None], other=0.0)
            # For the next tile: its loads would wait for a page number of the same iteration.
            after = start + TILE + step
            page = tl.load(pages + after // BLOCK, mask=after < limit, other=0).to(tl.int64)
            scores = tl.where(real[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
            most = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - most[:, None])
            fade = tl.exp2(top - most)
            total = total * fade + tl.sum(weights, 1)
            values = values * fade[:, None] + tl.dot(weights.to(v.dtype), v)
            top = most
        if is_last:
            score = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
            score = tl.where(length > 0, score, float("-inf"))
            new_value = tl.where(length > 0, new_value, 0.0)  # in padding it may be NaN
            its = new_value.to(tl.float32)[None, :]
            top, total, values = added(top, total, values, score, 1.0, its)
            if slot >= 0:
                place = slot // BLOCK * block_step + head_at + slot % BLOCK * token_step
                tl.store(cache_ptr + place + feature, new_key)
                tl.store(cache_ptr + place + SIZE + feature, new_value)
        # The sequence has `left` parts in this level, `reach` programs apart. A program opens at
        # most one such sequence, in its slot 1, and continues at most one, in its slot 0. The
        # counter of a group has the index of its first slot, which the sum replaces.
        opener = first // each
        number_of_part, left, reach = program - opener, (end - 1) // each - opener + 1, 1
        arrived = arrived_ptr + head * PROGRAMS * 2
        while left > 1:
            slot_of_part = (opener + number_of_part * reach) * 2 + (number_of_part == 0)
            part = parts + slot_of_part * GROUP * (SIZE + 2)
            tl.store(part + row, top, mask=is_row)
            tl.store(part + GROUP + row, total, mask=is_row)
            tl.store(part + values_at, values, mask=is_row[:, None])
            tl.debug_barrier()  # before a thread publishes the stores of all by its atomic
            group = number_of_part // FAN
            leader = opener + group * FAN * reach
            several = tl.minimum(left - group * FAN, FAN)
            counter = arrived + (leader * 2 + (group == 0))
            if tl.atomic_add(counter, 1, sem="acq_rel") == several - 1:
                tl.store(counter, 0)
                top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
                total = tl.zeros((ROWS,), dtype=tl.float32)
                values = tl.zeros((ROWS, SIZE), dtype=tl.float32)
                for other in tl.static_range(FAN):
                    slot_of_part = (leader + other * reach) * 2 + ((group == 0) & (other == 0))
                    part = parts + slot_of_part * GROUP * (SIZE + 2)
                    there = is_row & (other < several)
                    its_top = tl.load(part + row, there, float("-inf"), cache_modifier=".cg")
                    its_total = tl.load(part + GROUP + row, there, 0.0, cache_modifier=".cg")
                    its = tl.load(part + values_at, there[:, None], 0.0, cache_modifier=".cg")
                    top, total, values = added(top, total, values, its_top, its_total, its)
                tl.debug_barrier()  # all threads have read before the sum replaces the first part
                number_of_part, left, reach = group, tl.cdiv(left, FAN), reach * FAN
                arrived += heads * PROGRAMS * 2
            else:
                left = 0  # another program continues
        if left == 1:
            result = values / tl.where(total > 0, total, 1.0)[:, None]
            out = out_ptr + sequence * out_step + heads_at
            tl.store(out, result.to(out_ptr.dtype.element_ty), mask=is_row[:, None])
        tile = until
