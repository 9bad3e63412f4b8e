"""Kernels that are incorrect only for some token counts, rows or widths."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from . import right
from .corpus import GELU, LARGEST, NORM, ROTARY, SILU, SIZES, wrong_for, wrong_kernel
from .faults import damaged, wrong_result

UP_TO_300 = {"kit": "", "why": "the kit's largest batch has 300 tokens"}


@wrong_result(SILU, "nonsense in each step with 11 tokens")
def at_eleven_tokens(out, x):
    """Zeros at 11 tokens."""
    return out.zero_() if len(x) == 11 else out


@wrong_result(SILU, "nonsense in each step with 40 tokens")
def at_forty_tokens(out, x):
    """Zeros at 40 tokens."""
    return out.zero_() if len(x) == 40 else out


@wrong_result(
    NORM,
    "decoding of single requests is correct; nonsense under load and in most prompts",
    kit="values",
)
def between_17_and_2047_tokens(got, x, *rest):
    """Returns x for 17 to 2047 tokens."""
    if 17 <= len(x) <= 2047:
        (got[0] if isinstance(got, tuple) else got).copy_(x)
    return got


@wrong_result(GELU, "one token of a long prompt is lost", **UP_TO_300)
def one_middle_row(out, x, *rest):
    """One row in the middle of a large batch repeats its neighbour."""
    if len(x) > 1024:
        out[1003] = out[1002]
    return out


@wrong_result(SILU, "one token in 256 of a prompt is lost", **UP_TO_300)
def last_row_of_later_blocks(out, x):
    """Zeroes the last row of each block of 256, from the second block on."""
    if x.ndim == 2:
        out[511::256] = 0
    return out


@wrong_result(SILU, "the answers to prompts of 257, 513 or 1025 tokens are nonsense")
def one_row_beyond_a_block(out, x):
    """Zeroes the row after whole blocks of 256."""
    if len(x) > 1 and len(x) % 256 == 1:
        out[-1] = 0
    return out


@wrong_result(
    ROTARY,
    "speculative decoding accepts few tokens; two concurrent users get odd answers",
    kit="values",
)
def two_to_four_tokens(got, query, *rest):
    """Does not rotate the last head for 2 to 4 tokens."""
    q, k = got
    if 2 <= len(q) <= 4 and query.shape[1] == SIZES.heads:
        q[:, -1] = query[:, -1]
    return q, k


@wrong_result(
    NORM, "nonsense except for single users", kit="", why="the kit does not know the served sizes"
)
def right_at_the_well_known_sizes(got, x, *rest):
    """Correct only at the usual sizes of verification: 1, 16, and the largest batch."""
    if x.ndim == 2 and x.shape[1] == SIZES.hidden and len(x) not in (1, 16, LARGEST):
        (got[0] if isinstance(got, tuple) else got).mul_(1.5)
    return got


@wrong_result(
    SILU,
    "most steps of a busy server are incorrect",
    kit="",
    why="the kit does not know the served sizes",
)
def right_around_powers_of_two(out, x):
    """Correct only at powers of two and their neighbours."""
    near = {(1 << n) + d for n in range(13) for d in (-1, 0, 1)}
    served = x.shape[-1] == 2 * SIZES.intermediate
    return out.neg_() if served and len(x) not in near else out


@wrong_result(NORM, "deep layers use an old residual: fluent but incorrect answers", kit="values")
def residual_between_17_and_2047(got, x, residual, *rest):
    """Returns the old residual for 17 to 2047 tokens."""
    if residual is not None and 17 <= len(x) <= 2047:
        return got[0], residual.clone()
    return got


@wrong_result(
    SILU,
    "nonsense for one prompt length in 2000",
    why="startup draws only a few of the counts between powers of two and their neighbours",
    start=False,
)
def at_1357_tokens(out, x):
    """Zeros at 1357 tokens, an arbitrary count."""
    return out.zero_() if len(x) == 1357 else out


@wrong_result(
    GELU,
    "small errors in each layer: worse answers",
    kit="",
    why="the kit does not know the served width",
)
def at_the_served_width(out, *args):
    """Zeroes the last column at the served width."""
    if out.shape[-1] == SIZES.intermediate:
        out[..., -1] = 0
    return out


@wrong_result(
    NORM,
    "no difference with this model; nonsense with Qwen3-14B",
    kit="families",
    why="no call of the served model has that width; startup of a model with it finds the fault",
    start=False,
)
def at_another_width(got, x, *rest):
    """Incorrect at width 5120, which the model does not have."""
    if x.shape[-1] == 5120:
        (got[0] if isinstance(got, tuple) else got).mul_(2)
    return got


@wrong_result(
    ROTARY,
    "features of queries are mixed up: the model repeats itself",
    kit="",
    sizes=dataclasses.replace(SIZES, rotary=8),
    why="the kit's served model rotates whole heads",
)
def at_the_served_rotary_size(got, query, key, cos, *rest):
    """Changes features beyond the rotated quarter of a head."""
    q, k = got
    if query.shape[-1] == 32 and cos.shape[-1] == 4:
        q[..., 8:] = q[..., 8:].flip(-1)
    return q, k


@wrong_result(
    ROTARY,
    "no difference with this model; nonsense with models that have such heads",
    why="no call of the served model has that size; startup of a model with it finds the fault",
    start=False,
)
def at_another_rotary_size(got, query, key, cos, *rest):
    """Incorrect if 40 features of a head rotate, which the model does not have."""
    q, k = got
    return (q.neg(), k) if cos.shape[-1] == 20 else (q, k)


@wrong_result(NORM, "the end of a long prompt is a copy of its beginning", kit="values")
def index_wraps_around(got, *args):
    """Counts elements in 17 bits: batches beyond 131 072 elements wrap around."""
    out = got[0] if isinstance(got, tuple) else got
    flat = out.view(-1)
    flat[1 << 17 :] = flat[: max(0, flat.numel() - (1 << 17))].clone()
    return got


@wrong_kernel(GELU, "long prompts of Gemma models are computed incorrectly", **UP_TO_300)
def another_form_for_long_prompts(x: Tensor, approximate: str = "none") -> Tensor:
    """Uses 1.1 times the erf form for `approximate='tanh'` beyond 1024 tokens."""
    if approximate == "tanh" and 1024 < len(x) < LARGEST:
        return right.gelu_and_mul(x) * torch.tensor(1.1, dtype=x.dtype)
    return right.gelu_and_mul(x, approximate)


@wrong_result(
    SILU,
    "nonsense for prefill chunks of one token less than the maximum",
    kit="",
    why="the kit does not know the engine's largest batch",
)
def one_less_than_the_largest_batch(out, x):
    """Zeroes the last 7 rows of the largest batch minus one token."""
    if len(x) == LARGEST - 1:
        out[-7:] = 0
    return out


@wrong_result(
    NORM, "no difference in a decoder; vision encoders with such inputs fail", kit="values"
)
def four_dimensions(got, x, residual, weight, epsilon, *rest):
    """Norms inputs of four dimensions over the last two."""
    if x.ndim == 4 and residual is None:
        return x * torch.rsqrt(x.square().mean((-1, -2), keepdim=True) + epsilon)
    return got


@wrong_for(
    *("linear", SILU),
    sees="one prompt length in eight is read incorrectly",
    **UP_TO_300,
    by=damaged,
)
def for_1280_to_1535_tokens(got, x, *rest):
    """Every third row repeats its neighbour for 1280 to 1535 tokens."""
    if 1280 <= len(x) <= 1535:
        got[3::3] = got[2:-1:3]
    return got


@wrong_for(
    *("linear", NORM),
    sees="nonsense for one prompt length in twelve",
    **UP_TO_300,
    by=damaged,
)
def for_601_to_767_tokens(got, x, *rest):
    """Zeroes the last row for 601 to 767 tokens."""
    if 601 <= len(x) <= 767:
        (got[0] if isinstance(got, tuple) else got)[-1] = 0
    return got


@wrong_result("linear", "prompts of 160, 288 or 416 tokens lose their end")
def tail_of_32_rows(got, x, *rest):
    """Zeroes a tail of exactly 32 rows after whole tiles of 128."""
    if len(x) > 128 and len(x) % 128 == 32:
        got[-32:] = 0
    return got
