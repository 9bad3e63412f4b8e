"""Routing, block alignment and sum of a mixture of experts, on vLLM's CUDA kernels."""

from __future__ import annotations

import torch

from vllm_fl import Availability
from vllm_fl_ops.contracts.moe_align_block_size import places

from . import implementation, kernel, packed

__all__ = [
    "OPS",
    "grouped_topk",
    "moe_align_block_size",
    "moe_sum",
    "moe_topk",
]


SPECIAL_SIZES = frozenset({1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 576})
"""Numbers of experts with a specialised kernel. The general kernel searches for a score above -1,
and chooses expert 0 again if no biased score is above -1.
"""

MOST = 32
"""Maximum groups, and experts per token, of the grouped kernel."""

MOST_ALIGNED = 992
"""Maximum experts that one block of 1024 threads can count rows for."""


def moe_topk(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's experts with the highest scores, and their weights, in fp32.

    With a bias, only numbers of experts in `SPECIAL_SIZES` are supported.
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
    rows = torch.empty_like(ids)  # an output of the kernel that is not used
    last = _left_out(name, "is_padding")  # no token is padding
    kernel(name)(weights, ids, rows, logits, renormalize, bias, *factor, *last)
    if not factor and routed_scaling_factor != 1.0:
        weights *= routed_scaling_factor
    return weights, ids


def _left_out(name: str, last: str) -> tuple[None, ...]:
    """Return None for the argument `last` if this release's kernel has it."""
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
    """Return the best experts of each token's best groups, and their weights, in fp32.

    PyTorch computes a softmax before the kernel. Not supported: a missing bias, more than 32 groups
    or experts per token.
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
    """Sort rows by expert, in arbitrary order within an expert, and pad them to whole blocks."""
    ids, rows = topk_ids.contiguous(), topk_ids.numel()
    length = places(rows, block_size, num_experts, pad_sorted_ids)
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
        expert_ids = expert_map[expert_ids]  # -1 or 0 after the used blocks
    return sorted_token_ids, expert_ids, used


def moe_sum(
    input: torch.Tensor,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum over each token's experts on this rank, in fp32, rounded once.

    The kernel supports strides of input and ids.
    """
    out = input.new_empty((input.shape[0], input.shape[2]))
    if out.numel():
        where = None if expert_map is None else expert_map.contiguous()
        kernel("_moe_C::moe_sum")(input, out, topk_ids, where)
    return out


def _sees_every_score(experts: int, e_score_correction_bias: torch.Tensor | None) -> Availability:
    if e_score_correction_bias is None or experts in SPECIAL_SIZES:
        return True
    return f"with a bias, the kernel for {experts} experts may choose expert 0 twice"


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
