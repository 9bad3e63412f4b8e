"""Around the experts of a mixture: routing, blocks and the sum, on vLLM's CUDA kernels."""

from __future__ import annotations

import torch

from vllm_fl import Availability

from . import implementation, kernel, packed

__all__ = [
    "OPS",
    "grouped_topk",
    "moe_align_block_size",
    "moe_sum",
    "moe_topk",
]


SPECIAL_SIZES = frozenset({1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 576})
"""Numbers of experts for which there is a kernel of their own. The one for other numbers looks for
a score above -1, and takes expert 0 again where a bias leaves none."""

MOST = 32
"""Groups, and experts of a token, that the grouped kernel takes."""

MOST_ALIGNED = 992
"""Experts whose rows one block of 1024 threads can count."""


def moe_topk(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token with the highest scores, and their weights, in fp32.

    Args:
        gating_output: (tokens, experts), float32, float16 or bfloat16, of any layout.
        topk: from 1 to experts.
        renormalize: whether a token's weights are divided by their sum.
        scoring_func: "softmax" or "sigmoid".
        routed_scaling_factor: a finite number.
        e_score_correction_bias: (experts,), floating, or None.

    Returns:
        (weights, float32; ids, int32), both (tokens, topk).
    """
    logits = packed(gating_output)
    shape = (logits.shape[0], topk)
    weights = logits.new_empty(shape, dtype=torch.float32)
    ids = logits.new_empty(shape, dtype=torch.int32)
    if not ids.numel():
        return weights, ids
    bias = e_score_correction_bias
    if bias is not None:
        bias = bias.float().contiguous()
    name = f"_moe_C::topk_{scoring_func}"
    factor = () if scoring_func == "softmax" else (routed_scaling_factor,)
    rows = torch.empty_like(ids)  # which row of a permutation each pair takes: read by nobody
    last = _left_out(name, "is_padding")  # no token is padding
    kernel(name)(weights, ids, rows, logits, renormalize, bias, *factor, *last)
    if not factor and routed_scaling_factor != 1.0:
        weights *= routed_scaling_factor
    return weights, ids


def _left_out(name: str, last: str) -> tuple[None, ...]:
    """None for the `last` argument of a kernel, to a release that has it."""
    arguments = kernel(name)._schema.arguments  # type: ignore[attr-defined]
    return (None,) if arguments[-1].name == last else ()


def grouped_topk(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int,
    topk_group: int,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best experts of the best groups of each token, and their weights, in fp32.

    Args:
        gating_output: (tokens, experts), float32, float16 or bfloat16, of any layout.
        topk: from 1 to 32, and to the experts of topk_group groups.
        renormalize: whether a token's weights are divided by their sum.
        num_expert_group: a divisor of experts, at most 32, that leaves two or more for each group.
        topk_group: from 1 to num_expert_group.
        scoring_func: "softmax", which PyTorch computes before the kernel, or "sigmoid".
        routed_scaling_factor: a finite number.
        e_score_correction_bias: (experts,), floating.

    Returns:
        (weights, float32; ids, int32), both (tokens, topk).
    """
    logits = packed(gating_output.float())  # the kernel rounds scores to the logits' dtype
    if not logits.numel():
        shape = (logits.shape[0], topk)
        return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int32)
    is_sigmoid = scoring_func == "sigmoid"
    bias = e_score_correction_bias
    routing: tuple[torch.Tensor, torch.Tensor] = kernel("_moe_C::grouped_topk")(
        logits if is_sigmoid else logits.softmax(-1),
        num_expert_group,
        topk_group,
        topk,
        renormalize,
        routed_scaling_factor,
        None if bias is None else bias.contiguous(),
        int(is_sigmoid),
    )
    return routing


def moe_align_block_size(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows of each expert in the order in which threads come, filled up to whole blocks.

    Args:
        topk_ids: (tokens, topk), int32 or int64, of any layout, negative in a place without an
            expert.
        block_size: places of a block, at least 1.
        num_experts: experts of all ranks together, from 1 to 992.
        expert_map: (num_experts,) or longer, int32, -1 for an expert elsewhere, or None.
        pad_sorted_ids: whether the first result is as long as whole blocks are.
        ignore_invalid_experts: whether experts elsewhere have no rows.

    Returns:
        (rows and padding; the expert of each block; how many places are in use), int32.
    """
    ids, rows = topk_ids.contiguous(), topk_ids.numel()
    most = rows + num_experts * (block_size - 1)
    if pad_sorted_ids:
        most = -(-most // block_size) * block_size
    length = min(rows * block_size, most)
    sorted_token_ids = ids.new_empty(length, dtype=torch.int32)
    expert_ids = ids.new_empty(-(-length // block_size), dtype=torch.int32)
    if not rows:  # a grid of no programs is an error
        return sorted_token_ids, expert_ids, ids.new_zeros(1, dtype=torch.int32)
    used = ids.new_empty(1, dtype=torch.int32)
    where = expert_map if ignore_invalid_experts else None
    name = "_moe_C::moe_align_block_size"
    kernel(name)(
        ids,
        num_experts,
        block_size,
        sorted_token_ids,
        expert_ids,
        used,
        None if where is None else where.contiguous(),
        *_left_out(name, "scatter_idx"),
    )
    if expert_map is not None and where is None:
        expert_ids = expert_map[expert_ids]  # behind the blocks in use there is -1, or 0
    return sorted_token_ids, expert_ids, used


def moe_sum(
    input: torch.Tensor,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum over each token's experts that are on this rank, in fp32, rounded once.

    The kernel minds the strides of input and ids.

    Args:
        input: (tokens, topk, hidden), float32, float16 or bfloat16, of any layout.
        topk_ids: (tokens, topk), int32 or int64, negative in a place without an expert, or None.
        expert_map: (experts,), int32, negative for an expert that is elsewhere, or None.

    Returns:
        (tokens, hidden), of input's dtype.
    """
    out = input.new_empty((input.shape[0], input.shape[2]))
    if out.numel():
        where = None if expert_map is None else expert_map.contiguous()
        kernel("_moe_C::moe_sum")(input, out, topk_ids, where)
    return out


def _sees_every_score(experts: int, e_score_correction_bias: torch.Tensor | None) -> Availability:
    if e_score_correction_bias is None or experts in SPECIAL_SIZES:
        return True
    return f"no kernel for {experts} experts sees every score that a bias leaves"


OPS = (
    implementation(
        moe_topk, "_moe_C::topk_softmax", "_moe_C::topk_sigmoid", takes=(_sees_every_score,)
    ),
    implementation(
        grouped_topk,
        "_moe_C::grouped_topk",
        takes=("e_score_correction_bias is not None", f"max(topk, num_expert_group) <= {MOST}"),
    ),
    implementation(
        moe_align_block_size,
        "_moe_C::moe_align_block_size",
        takes=(f"num_experts <= {MOST_ALIGNED}",),
    ),
    implementation(moe_sum, "_moe_C::moe_sum"),
)
