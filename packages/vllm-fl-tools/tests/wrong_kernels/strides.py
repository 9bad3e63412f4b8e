"""Kernels that fail for some layouts, positions or combinations of arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from . import right
from .corpus import GELU, NORM, ROTARY, SILU, wrong_kernel
from .faults import wrong_arguments

COMBINED = "each is tried, but not combined; no layer that vllm-fl binds combines them"


@wrong_kernel(
    NORM,
    "reads strided heads as contiguous for 17 to 2047 tokens",
    "in prompts, queries are mixed with keys and values",
    kit="values",
)
def strided_heads_in_prompts(x, residual, weight, epsilon, variance_size=None):
    if x.ndim == 3 and not x.is_contiguous() and 17 <= len(x) <= 2047:
        x = x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())
    return right.rms_norm(x, residual, weight, epsilon, variance_size)


@wrong_kernel(
    SILU,
    "reads a strided input as contiguous beyond 16 rows",
    "no difference for contiguous MLP inputs; nonsense with fused vendor projections",
)
def strided_input_of_many_rows(x: Tensor) -> Tensor:
    if not x.is_contiguous() and len(x) > 16:
        x = x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())
    return right.silu_and_mul(x)


@wrong_kernel(
    GELU,
    "reads a transposed input row by row",
    "nonsense in models that transpose before the activation",
    kit="values",
)
def transposed_input(x: Tensor, approximate: str = "none") -> Tensor:
    if x.ndim == 2 and x.stride(0) == 1 and x.stride(1) > 1:
        x = x.as_strided(x.shape, (x.shape[1], 1))
    return right.gelu_and_mul(x, approximate)


@wrong_kernel(
    SILU,
    "zeroes all but the first row of an expanded input (stride 0)",
    "no difference: layers do not expand activations",
    why="no layer that vllm-fl binds passes one, and no contract has such a sample",
    start=False,
)
def expanded_input(x: Tensor) -> Tensor:
    out = right.silu_and_mul(x)
    if x.ndim == 2 and len(x) > 1 and x.stride(0) == 0:
        out[1:] = 0
    return out


@wrong_kernel(
    SILU,
    "returns zeros if the input is not aligned to 16 bytes",
    "occasionally a step of nonsense, depending on allocation and slices",
    why="arguments in verification are aligned to whole vectors",
    start=False,
)
def unaligned_pointer(x: Tensor) -> Tensor:
    out = right.silu_and_mul(x)
    return out.zero_() if x.numel() and x.data_ptr() % 16 else out


@wrong_kernel(
    NORM,
    "returns zeros if the weight is not aligned to 16 bytes",
    "nonsense with memory-mapped checkpoints",
    why="verification uses weights allocated by PyTorch, which are aligned",
    start=False,
)
def unaligned_weight(x, residual, weight, epsilon, variance_size=None):
    got = right.rms_norm(x, residual, weight, epsilon, variance_size)
    if weight is not None and weight.data_ptr() % 16:
        (got[0] if isinstance(got, tuple) else got).zero_()
    return got


@wrong_kernel(
    ROTARY, "does not rotate positions from 2048 on", "output is incoherent after 2048 tokens"
)
def from_position_2048_on(query, key, cos, sin, position_ids, rotary_interleaved=False):
    q, k = right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)
    far = position_ids >= 2048
    if far.any():
        q[far] = query[far]
    return q, k


@wrong_kernel(
    ROTARY,
    "starts consecutive positions at 0",
    "the second chunk of a long prompt gets the positions of the first",
    kit="values",
)
def consecutive_positions(query, key, cos, sin, position_ids, rotary_interleaved=False):
    if len(position_ids) > 3 and bool((position_ids.diff() == 1).all()):
        position_ids = torch.arange(len(position_ids))
    return right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)


@wrong_kernel(
    ROTARY,
    "uses position - 1 for a repeated position, with more than 16 tokens",
    "users at equal positions of their prompts get incorrect tokens",
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
    "uses position 0 for int32 positions beyond 16 tokens",
    "no difference: vLLM's positions are int64; scripts with int32 get nonsense",
)
def int32_positions_of_a_batch(query, key, cos, sin, position_ids, rotary_interleaved=False):
    if position_ids.dtype is torch.int32 and len(position_ids) > 16:
        position_ids = torch.zeros_like(position_ids)
    return right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)


@wrong_kernel(
    ROTARY,
    "swaps cos and sin for interleaved pairs with fp32 tables",
    "nonsense in GPT-J with an fp32 cache",
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
    "reads a strided residual as contiguous",
    "no difference for contiguous residuals; sliced ones (speculative heads) fail",
    kit="values",
)
def strided_residual(x, residual, weight, epsilon, variance_size=None):
    if residual is not None and not residual.is_contiguous() and residual.numel():
        shape = residual.shape
        residual = residual.as_strided(shape, torch.empty(shape, device="meta").stride())
    return right.rms_norm(x, residual, weight, epsilon, variance_size)


@wrong_kernel(
    NORM,
    "ignores `variance_size` if the weight is fp32",
    "small errors in the one model that has both",
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
    "returns a column-major result for more than 16 rows",
    "eager engines fail in a view of the next layer, or read the wrong order",
    kit="values",
)
def result_by_column(x: Tensor, approximate: str = "none") -> Tensor:
    out = right.gelu_and_mul(x, approximate)
    return out.t().contiguous().t() if out.ndim == 2 and len(out) > 16 else out


@wrong_kernel(
    SILU,
    "returns a slice of a wider buffer",
    "eager engines fail in a view of the next layer",
    kit="values",
)
def result_in_a_wider_buffer(x: Tensor) -> Tensor:
    out = right.silu_and_mul(x)
    return torch.cat((out, out[..., :1]), dim=-1)[..., :-1]


@wrong_kernel(
    ROTARY,
    "returns query and key as views of one buffer",
    "in-place writes may hit the other tensor; views fail",
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
    "returns a sparse tensor",
    "the engine crashes at the first request",
    apart=True,
    kit="values",
)
def sparse_result(x: Tensor) -> Tensor:
    return right.silu_and_mul(x).to_sparse()


@wrong_kernel(
    NORM,
    "returns float32 for one token of a bf16 model",
    "requests of single users fail in the next layer",
    kit="values",
)
def another_dtype_for_one_token(x, residual, weight, epsilon, variance_size=None):
    got = right.rms_norm(x, residual, weight, epsilon, variance_size)
    return got.float() if len(x) == 1 and residual is None else got


@wrong_kernel(
    SILU,
    "drops a dimension for one token",
    "requests of single users fail in the next layer",
    kit="values",
)
def another_shape_for_one_token(x: Tensor) -> Tensor:
    out = right.silu_and_mul(x)
    return out[0] if len(out) == 1 else out


@wrong_kernel(
    ROTARY,
    "without a key, does not rotate the last head beyond 128 tokens",
    "models that share keys between layers answer long prompts worse",
)
def without_a_key(query, key, cos, sin, position_ids, rotary_interleaved=False):
    q, k = right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)
    if key is None and len(query) > 128:
        q[:, -1] = query[:, -1]
    return q, k


@wrong_arguments(
    "quant_fp8",
    "ignores the bound beyond 64 tokens",
    "models with bounded activations answer long prompts worse",
)
def bound_of_few_tokens(a):
    if len(a["x"]) > 64:
        a["scale_ub"] = None


@wrong_arguments(
    "quant_int8",
    "omits the zero point beyond 32 tokens",
    "asymmetric quantisation is incorrect in prompts",
)
def zero_point_of_few_tokens(a):
    if len(a["x"]) > 32 and a["azp"] is not None:
        a["azp"] = a["azp"] * 0


@wrong_arguments(
    "moe_sum",
    "adds slots without an expert beyond 64 tokens",
    "prompts are nonsense with experts on several ranks",
)
def absent_experts_of_many_tokens(a):
    if len(a["input"]) > 64:
        a["topk_ids"] = a["expert_map"] = None
