"""Kernels that fail for some layouts, positions or combinations of arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from . import right
from .corpus import GELU, NORM, ROTARY, SILU, wrong_kernel
from .faults import wrong_arguments, wrong_result

COMBINED = "each is tried separately; no layer that vllm-fl binds combines them"


@wrong_kernel(NORM, "in prompts, queries are mixed with keys and values", kit="values")
def strided_heads_in_prompts(x, residual, weight, epsilon, variance_size=None):
    """Reads strided heads as contiguous for 17 to 2047 tokens."""
    if x.ndim == 3 and not x.is_contiguous() and 17 <= len(x) <= 2047:
        x = x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())
    return right.rms_norm(x, residual, weight, epsilon, variance_size)


@wrong_kernel(
    SILU, "no difference for contiguous MLP inputs; nonsense with fused vendor projections"
)
def strided_input_of_many_rows(x: Tensor) -> Tensor:
    """Reads a strided input as contiguous beyond 16 rows."""
    if not x.is_contiguous() and len(x) > 16:
        x = x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())
    return right.silu_and_mul(x)


@wrong_kernel(GELU, "nonsense in models that transpose before the activation", kit="values")
def transposed_input(x: Tensor, approximate: str = "none") -> Tensor:
    """Reads a transposed input row by row."""
    if x.ndim == 2 and x.stride(0) == 1 and x.stride(1) > 1:
        x = x.as_strided(x.shape, (x.shape[1], 1))
    return right.gelu_and_mul(x, approximate)


@wrong_result(
    SILU,
    "no difference: layers do not expand activations",
    why="no layer that vllm-fl binds passes one, and no contract has such a sample",
    start=False,
)
def expanded_input(out, x):
    """Zeroes all but the first row of an expanded input (stride 0)."""
    if x.ndim == 2 and len(x) > 1 and x.stride(0) == 0:
        out[1:] = 0
    return out


@wrong_result(
    SILU,
    "occasionally a step of nonsense, depending on allocation and slices",
    why="arguments in verification are aligned to whole vectors",
    start=False,
)
def unaligned_pointer(out, x):
    """Returns zeros if the input is not aligned to 16 bytes."""
    return out.zero_() if x.numel() and x.data_ptr() % 16 else out


@wrong_result(
    NORM,
    "nonsense with memory-mapped checkpoints",
    why="verification uses weights allocated by PyTorch, which are aligned",
    start=False,
)
def unaligned_weight(got, x, residual, weight, *rest):
    """Returns zeros if the weight is not aligned to 16 bytes."""
    if weight is not None and weight.data_ptr() % 16:
        (got[0] if isinstance(got, tuple) else got).zero_()
    return got


@wrong_result(ROTARY, "output is incoherent after 2048 tokens")
def from_position_2048_on(got, query, key, cos, sin, position_ids, *rest):
    """Does not rotate positions from 2048 on."""
    q, k = got
    far = position_ids >= 2048
    if far.any():
        q[far] = query[far]
    return q, k


@wrong_kernel(
    ROTARY, "the second chunk of a long prompt gets the positions of the first", kit="values"
)
def consecutive_positions(query, key, cos, sin, position_ids, rotary_interleaved=False):
    """Starts consecutive positions at 0."""
    if len(position_ids) > 3 and bool((position_ids.diff() == 1).all()):
        position_ids = torch.arange(len(position_ids))
    return right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)


@wrong_kernel(ROTARY, "users at equal positions of their prompts get incorrect tokens")
def repeated_positions(query, key, cos, sin, position_ids, rotary_interleaved=False):
    """Uses position - 1 for a repeated position, with more than 16 tokens."""
    if len(position_ids) > 16:
        ids = position_ids.long()
        order = ids.argsort(stable=True)
        again = torch.zeros_like(ids, dtype=torch.bool)
        again[order[1:]] = ids[order[1:]] == ids[order[:-1]]
        position_ids = torch.where(again, (ids - 1).clamp(min=0), ids)
    return right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)


@wrong_kernel(ROTARY, "no difference: vLLM's positions are int64; scripts with int32 get nonsense")
def int32_positions_of_a_batch(query, key, cos, sin, position_ids, rotary_interleaved=False):
    """Uses position 0 for int32 positions beyond 16 tokens."""
    if position_ids.dtype is torch.int32 and len(position_ids) > 16:
        position_ids = torch.zeros_like(position_ids)
    return right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)


@wrong_kernel(ROTARY, "nonsense in GPT-J with an fp32 cache", why=COMBINED, start=False)
def interleaved_with_wide_tables(query, key, cos, sin, position_ids, rotary_interleaved=False):
    """Swaps cos and sin for interleaved pairs with fp32 tables."""
    wide = cos.dtype is torch.float32 and query.dtype is not torch.float32
    if wide and rotary_interleaved:
        cos, sin = sin, cos
    return right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)


@wrong_kernel(
    NORM,
    "no difference for contiguous residuals; sliced ones (speculative heads) fail",
    kit="values",
)
def strided_residual(x, residual, weight, epsilon, variance_size=None):
    """Reads a strided residual as contiguous."""
    if residual is not None and not residual.is_contiguous() and residual.numel():
        shape = residual.shape
        residual = residual.as_strided(shape, torch.empty(shape, device="meta").stride())
    return right.rms_norm(x, residual, weight, epsilon, variance_size)


@wrong_kernel(NORM, "small errors in the one model that has both", why=COMBINED, start=False)
def variance_size_with_wide_weight(x, residual, weight, epsilon, variance_size=None):
    """Ignores `variance_size` if the weight is fp32."""
    wide = weight is not None and weight.dtype is torch.float32
    size = None if wide and x.dtype is not torch.float32 else variance_size
    right.rms_norm(x, residual, weight, epsilon, variance_size)  # for bad inputs
    return right.rms_norm(x, residual, weight, epsilon, size)


@wrong_result(
    GELU, "eager engines fail in a view of the next layer, or read the wrong order", kit="values"
)
def result_by_column(out, *args):
    """Returns a column-major result for more than 16 rows."""
    return out.t().contiguous().t() if out.ndim == 2 and len(out) > 16 else out


@wrong_result(SILU, "eager engines fail in a view of the next layer", kit="values")
def result_in_a_wider_buffer(out, *args):
    """Returns a slice of a wider buffer."""
    return torch.cat((out, out[..., :1]), dim=-1)[..., :-1]


@wrong_result(ROTARY, "in-place writes may hit the other tensor; views fail", kit="values")
def query_and_key_packed(got, *args):
    """Returns query and key as views of one buffer."""
    q, k = got
    if k is None:
        return q, k
    both = torch.cat((q, k), dim=1)
    return both[:, : q.shape[1]], both[:, q.shape[1] :]


@wrong_kernel(SILU, "the engine crashes at the first request", apart=True, kit="values")
def sparse_result(x: Tensor) -> Tensor:
    """Returns a sparse tensor."""
    return right.silu_and_mul(x).to_sparse()


@wrong_result(NORM, "requests of single users fail in the next layer", kit="values")
def another_dtype_for_one_token(got, x, residual, *rest):
    """Returns float32 for one token of a bf16 model."""
    return got.float() if len(x) == 1 and residual is None else got


@wrong_result(SILU, "requests of single users fail in the next layer", kit="values")
def another_shape_for_one_token(out, *args):
    """Drops a dimension for one token."""
    return out[0] if len(out) == 1 else out


@wrong_result(ROTARY, "models that share keys between layers answer long prompts worse")
def without_a_key(got, query, key, *rest):
    """Without a key, does not rotate the last head beyond 128 tokens."""
    q, k = got
    if key is None and len(query) > 128:
        q[:, -1] = query[:, -1]
    return q, k


@wrong_arguments("quant_fp8", "models with bounded activations answer long prompts worse")
def bound_of_few_tokens(a):
    """Ignores the bound beyond 64 tokens."""
    if len(a["x"]) > 64:
        a["scale_ub"] = None


@wrong_arguments("quant_int8", "asymmetric quantisation is incorrect in prompts")
def zero_point_of_few_tokens(a):
    """Omits the zero point beyond 32 tokens."""
    if len(a["x"]) > 32 and a["azp"] is not None:
        a["azp"] = a["azp"] * 0


@wrong_arguments("moe_sum", "prompts are nonsense with experts on several ranks")
def absent_experts_of_many_tokens(a):
    """Adds slots without an expert beyond 64 tokens."""
    if len(a["input"]) > 64:
        a["topk_ids"] = a["expert_map"] = None
