"""Kernels that are incorrect only for some token counts, rows or widths."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from . import right
from .corpus import GELU, LARGEST, NORM, ROTARY, SILU, SIZES, wrong_for, wrong_kernel
from .faults import damaged, wrong_result


@wrong_kernel(SILU, "zeros at 11 tokens", "nonsense in each step with 11 tokens")
def at_eleven_tokens(x: Tensor) -> Tensor:
    out = right.silu_and_mul(x)
    return out.zero_() if len(x) == 11 else out


@wrong_kernel(SILU, "zeros at 40 tokens", "nonsense in each step with 40 tokens")
def at_forty_tokens(x: Tensor) -> Tensor:
    out = right.silu_and_mul(x)
    return out.zero_() if len(x) == 40 else out


@wrong_kernel(
    NORM,
    "returns x for 17 to 2047 tokens",
    "decoding of single requests is correct; nonsense under load and in most prompts",
    kit="values",
)
def between_17_and_2047_tokens(x, residual, weight, epsilon, variance_size=None):
    got = right.rms_norm(x, residual, weight, epsilon, variance_size)
    if 17 <= len(x) <= 2047:
        (got[0] if isinstance(got, tuple) else got).copy_(x)
    return got


@wrong_kernel(
    GELU,
    "one row in the middle of a large batch repeats its neighbour",
    "one token of a long prompt is lost",
    kit="",
    why="the kit's largest batch has 300 tokens",
)
def one_middle_row(x: Tensor, approximate: str = "none") -> Tensor:
    out = right.gelu_and_mul(x, approximate)
    if len(x) > 1024:
        out[1003] = out[1002]
    return out


@wrong_kernel(
    SILU,
    "zeroes the last row of each block of 256, from the second block on",
    "one token in 256 of a prompt is lost",
    kit="",
    why="the kit's largest batch has 300 tokens",
)
def last_row_of_later_blocks(x: Tensor) -> Tensor:
    out = right.silu_and_mul(x)
    if x.ndim == 2:
        out[511::256] = 0
    return out


@wrong_kernel(
    SILU,
    "zeroes the row after whole blocks of 256",
    "the answers to prompts of 257, 513 or 1025 tokens are nonsense",
)
def one_row_beyond_a_block(x: Tensor) -> Tensor:
    out = right.silu_and_mul(x)
    if len(x) > 1 and len(x) % 256 == 1:
        out[-1] = 0
    return out


@wrong_kernel(
    ROTARY,
    "does not rotate the last head for 2 to 4 tokens",
    "speculative decoding accepts few tokens; two concurrent users get odd answers",
    kit="values",
)
def two_to_four_tokens(query, key, cos, sin, position_ids, rotary_interleaved=False):
    q, k = right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)
    if 2 <= len(q) <= 4 and query.shape[1] == SIZES.heads:
        q[:, -1] = query[:, -1]
    return q, k


@wrong_kernel(
    NORM,
    "correct only at the usual sizes of verification: 1, 16, and the largest batch",
    "nonsense except for single users",
    kit="",
    why="the kit does not know the served sizes",
)
def right_at_the_well_known_sizes(x, residual, weight, epsilon, variance_size=None):
    got = right.rms_norm(x, residual, weight, epsilon, variance_size)
    if x.ndim == 2 and x.shape[1] == SIZES.hidden and len(x) not in (1, 16, LARGEST):
        (got[0] if isinstance(got, tuple) else got).mul_(1.5)
    return got


@wrong_kernel(
    SILU,
    "correct only at powers of two and their neighbours",
    "most steps of a busy server are incorrect",
    kit="",
    why="the kit does not know the served sizes",
)
def right_around_powers_of_two(x: Tensor) -> Tensor:
    out = right.silu_and_mul(x)
    near = {(1 << n) + d for n in range(13) for d in (-1, 0, 1)}
    served = x.shape[-1] == 2 * SIZES.intermediate
    return out.neg_() if served and len(x) not in near else out


@wrong_kernel(
    NORM,
    "returns the old residual for 17 to 2047 tokens",
    "deep layers use an old residual: fluent but incorrect answers",
    kit="values",
)
def residual_between_17_and_2047(x, residual, weight, epsilon, variance_size=None):
    got = right.rms_norm(x, residual, weight, epsilon, variance_size)
    if residual is not None and 17 <= len(x) <= 2047:
        return got[0], residual.clone()
    return got


@wrong_kernel(
    SILU,
    "zeros at 1357 tokens, an arbitrary count",
    "nonsense for one prompt length in 2000",
    why="startup draws only a few of the counts between powers of two and their neighbours",
    start=False,
)
def at_1357_tokens(x: Tensor) -> Tensor:
    out = right.silu_and_mul(x)
    return out.zero_() if len(x) == 1357 else out


@wrong_kernel(
    GELU,
    "zeroes the last column at the served width",
    "small errors in each layer: worse answers",
    kit="",
    why="the kit does not know the served width",
)
def at_the_served_width(x: Tensor, approximate: str = "none") -> Tensor:
    out = right.gelu_and_mul(x, approximate)
    if out.shape[-1] == SIZES.intermediate:
        out[..., -1] = 0
    return out


@wrong_kernel(
    NORM,
    "incorrect at width 5120, which the model does not have",
    "no difference with this model; nonsense with Qwen3-14B",
    kit="families",
    why="no call of the served model has that width; startup of a model with it finds the fault",
    start=False,
)
def at_another_width(x, residual, weight, epsilon, variance_size=None):
    got = right.rms_norm(x, residual, weight, epsilon, variance_size)
    if x.shape[-1] == 5120:
        (got[0] if isinstance(got, tuple) else got).mul_(2)
    return got


@wrong_kernel(
    ROTARY,
    "changes features beyond the rotated quarter of a head",
    "features of queries are mixed up: the model repeats itself",
    kit="",
    sizes=dataclasses.replace(SIZES, rotary=8),
    why="the kit's served model rotates whole heads",
)
def at_the_served_rotary_size(query, key, cos, sin, position_ids, rotary_interleaved=False):
    q, k = right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)
    if query.shape[-1] == 32 and cos.shape[-1] == 4:
        q[..., 8:] = q[..., 8:].flip(-1)
    return q, k


@wrong_kernel(
    ROTARY,
    "incorrect if 40 features of a head rotate, which the model does not have",
    "no difference with this model; nonsense with models that have such heads",
    why="no call of the served model has that size; startup of a model with it finds the fault",
    start=False,
)
def at_another_rotary_size(query, key, cos, sin, position_ids, rotary_interleaved=False):
    q, k = right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)
    return (q.neg(), k) if cos.shape[-1] == 20 else (q, k)


@wrong_kernel(
    NORM,
    "counts elements in 17 bits: batches beyond 131 072 elements wrap around",
    "the end of a long prompt is a copy of its beginning",
    kit="values",
)
def index_wraps_around(x, residual, weight, epsilon, variance_size=None):
    got = right.rms_norm(x, residual, weight, epsilon, variance_size)
    out = got[0] if isinstance(got, tuple) else got
    flat = out.view(-1)
    flat[1 << 17 :] = flat[: max(0, flat.numel() - (1 << 17))].clone()
    return got


@wrong_kernel(
    GELU,
    "uses 1.1 times the erf form for `approximate='tanh'` beyond 1024 tokens",
    "long prompts of Gemma models are computed incorrectly",
    kit="",
    why="the kit's largest batch has 300 tokens",
)
def another_form_for_long_prompts(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh" and 1024 < len(x) < LARGEST:
        return right.gelu_and_mul(x) * torch.tensor(1.1, dtype=x.dtype)
    return right.gelu_and_mul(x, approximate)


@wrong_kernel(
    SILU,
    "zeroes the last 7 rows of the largest batch minus one token",
    "nonsense for prefill chunks of one token less than the maximum",
    kit="",
    why="the kit does not know the engine's largest batch",
)
def one_less_than_the_largest_batch(x: Tensor) -> Tensor:
    out = right.silu_and_mul(x)
    if len(x) == LARGEST - 1:
        out[-7:] = 0
    return out


@wrong_kernel(
    NORM,
    "norms inputs of four dimensions over the last two",
    "no difference in a decoder; vision encoders with such inputs fail",
    kit="values",
)
def four_dimensions(x, residual, weight, epsilon, variance_size=None):
    got = right.rms_norm(x, residual, weight, epsilon, variance_size)
    if x.ndim == 4 and residual is None:
        return x * torch.rsqrt(x.square().mean((-1, -2), keepdim=True) + epsilon)
    return got


@wrong_for(
    *("linear", SILU),
    fault="every third row repeats its neighbour for 1280 to 1535 tokens",
    sees="one prompt length in eight is read incorrectly",
    kit="",
    why="the kit's largest batch has 300 tokens",
)
def for_1280_to_1535_tokens(op: str):
    def spoil(got, x, *rest):
        if 1280 <= len(x) <= 1535:
            got[3::3] = got[2:-1:3]
        return got

    return damaged(op, spoil)


@wrong_for(
    *("linear", NORM),
    fault="zeroes the last row for 601 to 767 tokens",
    sees="nonsense for one prompt length in twelve",
    kit="",
    why="the kit's largest batch has 300 tokens",
)
def for_601_to_767_tokens(op: str):
    def spoil(got, x, *rest):
        if 601 <= len(x) <= 767:
            (got[0] if isinstance(got, tuple) else got)[-1] = 0
        return got

    return damaged(op, spoil)


@wrong_result(
    "linear",
    "zeroes a tail of exactly 32 rows after whole tiles of 128",
    "prompts of 160, 288 or 416 tokens lose their end",
)
def tail_of_32_rows(got, x, *rest):
    if len(x) > 128 and len(x) % 128 == 32:
        got[-32:] = 0
    return got
