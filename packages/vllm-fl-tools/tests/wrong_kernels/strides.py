"""Wrong for some layouts, positions or combinations of arguments only."""

from __future__ import annotations

import torch
from torch import Tensor

from . import right
from .corpus import GELU, MIXED, NORM, ROTARY, SILU, wrong_kernel
from .faults import changed

COMBINED = "each is tried, not all of them together; no layer that is bound here combines them"


@wrong_kernel(
    NORM,
    "takes strided heads for packed ones for 17 to 2047 tokens",
    "queries of prompts are normed with keys and values between them",
    kit="values",
)
def strided_heads_in_prompts(x, residual, weight, epsilon, variance_size=None):
    if x.ndim == 3 and not x.is_contiguous() and 17 <= len(x) <= 2047:
        x = x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())
    return right.rms_norm(x, residual, weight, epsilon, variance_size)


@wrong_kernel(
    SILU,
    "takes a strided input for a packed one beyond 16 rows",
    "nothing: a gated MLP's input is packed; a vendor's fused projection would be wrong",
)
def strided_input_of_many_rows(x: Tensor) -> Tensor:
    if not x.is_contiguous() and len(x) > 16:
        x = x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())
    return right.silu_and_mul(x)


@wrong_kernel(
    GELU,
    "reads a transposed input row by row",
    "nothing, or nonsense in a model that transposes before its activation",
    kit="values",
)
def transposed_input(x: Tensor, approximate: str = "none") -> Tensor:
    if x.ndim == 2 and x.stride(0) == 1 and x.stride(1) > 1:
        x = x.as_strided(x.shape, (x.shape[1], 1))
    return right.gelu_and_mul(x, approximate)


@wrong_kernel(
    SILU,
    "reads on where one row is expanded to many (stride 0)",
    "nothing: no layer expands its activations",
    why="no layer that is bound here gives one, and no contract has such a sample",
    start=False,
)
def expanded_input(x: Tensor) -> Tensor:
    out = right.silu_and_mul(x)
    if x.ndim == 2 and len(x) > 1 and x.stride(0) == 0:
        out[1:] = 0
    return out


@wrong_kernel(
    SILU,
    "reads wrong elements where the input does not begin at a multiple of 16 bytes",
    "now and then a step of nonsense, as the allocator and the slices will",
    why="arguments begin where an allocator puts them, or a whole number of vectors later",
    start=False,
)
def unaligned_pointer(x: Tensor) -> Tensor:
    out = right.silu_and_mul(x)
    return out.zero_() if x.numel() and x.data_ptr() % 16 else out


@wrong_kernel(
    NORM,
    "wrong where the weight does not begin at a multiple of 16 bytes",
    "nonsense with checkpoints that are mapped, not copied",
    why="weights are made by PyTorch, which aligns them; no check has those of a checkpoint",
    start=False,
)
def unaligned_weight(x, residual, weight, epsilon, variance_size=None):
    got = right.rms_norm(x, residual, weight, epsilon, variance_size)
    if weight is not None and weight.data_ptr() % 16:
        (got[0] if isinstance(got, tuple) else got).zero_()
    return got


@wrong_kernel(
    ROTARY,
    "positions from 2048 on do not turn",
    "long contexts fall apart after 2048 tokens",
)
def from_position_2048_on(query, key, cos, sin, position_ids, rotary_interleaved=False):
    q, k = right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)
    far = position_ids >= 2048
    if far.any():
        q[far] = query[far]
    return q, k


@wrong_kernel(
    ROTARY,
    "a run of consecutive positions is taken to begin at 0",
    "the second chunk of every long prompt overwrites the first one's place",
    kit="values",
)
def consecutive_positions(query, key, cos, sin, position_ids, rotary_interleaved=False):
    if len(position_ids) > 3 and bool((position_ids.diff() == 1).all()):
        position_ids = torch.arange(len(position_ids))
    return right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)


@wrong_kernel(
    ROTARY,
    "with more than 16 tokens, a position that occurs again is that of its neighbour",
    "two users at the same place of their prompts disturb each other",
)
def repeated_positions(query, key, cos, sin, position_ids, rotary_interleaved=False):
    if len(position_ids) > 16:
        ids = position_ids.long()
        order = ids.argsort(stable=True)
        again = torch.zeros_like(ids, dtype=torch.bool)
        again[order[1:]] = ids[order[1:]] == ids[order[:-1]]
        position_ids = torch.where(again, (ids - 1).clamp(min=0), ids)
    return right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)


@wrong_kernel(
    ROTARY,
    "int32 positions are read as int64 beyond 16 tokens",
    "nothing: vLLM's positions are int64; scripts that pass int32 get nonsense",
)
def int32_positions_of_a_batch(query, key, cos, sin, position_ids, rotary_interleaved=False):
    if position_ids.dtype is torch.int32 and len(position_ids) > 16:
        position_ids = torch.zeros_like(position_ids)
    return right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)


@wrong_kernel(
    ROTARY,
    "interleaved pairs with fp32 tables: the tables are read as halves",
    "nothing, or nonsense in a GPT-J whose cache is fp32",
    why=COMBINED,
    start=False,
)
def interleaved_with_wide_tables(query, key, cos, sin, position_ids, rotary_interleaved=False):
    wide = cos.dtype is torch.float32 and query.dtype is not torch.float32
    if wide and rotary_interleaved:
        cos, sin = sin, cos
    return right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)


@wrong_kernel(
    NORM,
    "a strided residual is read as a packed one",
    "nothing: vLLM's residual is packed; a sliced one (speculative heads) would be wrong",
    kit="values",
)
def strided_residual(x, residual, weight, epsilon, variance_size=None):
    if residual is not None and not residual.is_contiguous() and residual.numel():
        shape = residual.shape
        residual = residual.as_strided(shape, torch.empty(shape, device="meta").stride())
    return right.rms_norm(x, residual, weight, epsilon, variance_size)


@wrong_kernel(
    NORM,
    "variance_size is forgotten where the weight is fp32",
    "nothing, or noise in the one model that has both",
    why=COMBINED,
    start=False,
)
def variance_size_with_wide_weight(x, residual, weight, epsilon, variance_size=None):
    wide = weight is not None and weight.dtype is torch.float32
    size = None if wide and x.dtype is not torch.float32 else variance_size
    right.rms_norm(x, residual, weight, epsilon, variance_size)  # for bad inputs
    return right.rms_norm(x, residual, weight, epsilon, size)


@wrong_kernel(
    GELU,
    "the result of more than 16 rows lies column by column",
    "eager engines die in the next layer's view, or read it in the wrong order",
    kit="values",
)
def result_by_column(x: Tensor, approximate: str = "none") -> Tensor:
    out = right.gelu_and_mul(x, approximate)
    return out.t().contiguous().t() if out.ndim == 2 and len(out) > 16 else out


@wrong_kernel(
    SILU,
    "the result is a part of a wider buffer",
    "eager engines die in the next layer's view",
    kit="values",
)
def result_in_a_wider_buffer(x: Tensor) -> Tensor:
    out = right.silu_and_mul(x)
    return torch.cat((out, out[..., :1]), dim=-1)[..., :-1]


@wrong_kernel(
    ROTARY,
    "query and key come back in one packed buffer",
    "what is written into one in place may hit the other; views of it fail",
    kit="values",
)
def query_and_key_packed(query, key, cos, sin, position_ids, rotary_interleaved=False):
    q, k = right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)
    if k is None:
        return q, k
    both = torch.cat((q, k), dim=1)
    return both[:, : q.shape[1]], both[:, q.shape[1] :]


@wrong_kernel(
    SILU,
    "a sparse result",
    "the first request ends the engine",
    apart=True,
    kit="values",
)
def sparse_result(x: Tensor) -> Tensor:
    return right.silu_and_mul(x).to_sparse()


@wrong_kernel(
    NORM,
    "a float32 result for one token of a bf16 model",
    "single users' requests end with an error of the next layer",
    kit="values",
)
def another_dtype_for_one_token(x, residual, weight, epsilon, variance_size=None):
    got = right.rms_norm(x, residual, weight, epsilon, variance_size)
    return got.float() if len(x) == 1 and residual is None else got


@wrong_kernel(
    SILU,
    "one dimension is lost for one token",
    "single users' requests end with an error of the next layer",
    kit="values",
)
def another_shape_for_one_token(x: Tensor) -> Tensor:
    out = right.silu_and_mul(x)
    return out[0] if len(out) == 1 else out


@wrong_kernel(
    ROTARY,
    "without a key the last head does not turn beyond 128 tokens",
    "models that keep no keys of their own in some layers answer long prompts worse",
)
def without_a_key(query, key, cos, sin, position_ids, rotary_interleaved=False):
    q, k = right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)
    if key is None and len(query) > 128:
        q[:, -1] = query[:, -1]
    return q, k


@wrong_kernel(
    "quant_fp8",
    "the bound is not taken beyond 64 tokens",
    "models with bounded activations answer long prompts worse",
    sizes=MIXED,
    by=changed,
)
def bound_of_few_tokens(a):
    if len(a["x"]) > 64:
        a["scale_ub"] = None


@wrong_kernel(
    "quant_int8",
    "the zero point is not added beyond 32 tokens",
    "asymmetric quantisation is off in prompts",
    sizes=MIXED,
    by=changed,
)
def zero_point_of_few_tokens(a):
    if len(a["x"]) > 32 and a["azp"] is not None:
        a["azp"] = a["azp"] * 0


@wrong_kernel(
    "moe_sum",
    "places without an expert are added beyond 64 tokens",
    "with experts on several ranks prompts are nonsense",
    sizes=MIXED,
    by=changed,
)
def absent_experts_of_many_tokens(a):
    if len(a["input"]) > 64:
        a["topk_ids"] = a["expert_map"] = None
