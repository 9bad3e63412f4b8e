"""Routing, block alignment and sum of a mixture of experts, on FlagGems's Triton kernels."""

from __future__ import annotations

import torch

from vllm_fl_ops.contracts.moe_align_block_size import places

from ..kernels import contiguous, power_of_two
from ..loading import flag_gems
from . import implementation

MOST = 32
"""Maximum experts per token, and maximum groups, of the kernels."""

MOST_EXPERTS = 1024
"""Maximum number of experts. The kernel without groups silently ignores the logits of further
experts.
"""


def moe_topk(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's experts with the highest softmax, and their weights, in fp32.

    The kernel adds 1e-8 to each divisor. Not supported: other scores, a bias, more than 32 experts
    per token, more than 1024 experts.
    """
    gems = flag_gems()
    shape = (gating_output.shape[0], topk)
    weights = gating_output.new_empty(shape, dtype=torch.float32)
    ids, rows = (gating_output.new_empty(shape, dtype=torch.int32) for _ in range(2))
    if ids.numel():
        gems.topk_softmax(weights, ids, rows, contiguous(gating_output), renormalize)
    if routed_scaling_factor != 1.0:
        weights *= routed_scaling_factor
    return weights, ids


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

    PyTorch computes the scores. `topk` must be a power of two up to 32. Not supported: a missing
    bias, more than 32 groups.
    """
    gems = flag_gems()
    logits = contiguous(gating_output).float()  # the kernels round scores to the logits' dtype
    if not len(logits):  # not every device's driver may run an empty grid
        return logits.new_empty(0, topk), logits.new_empty(0, topk, dtype=torch.int32)
    routing: tuple[torch.Tensor, torch.Tensor] = gems.grouped_topk(
        logits.softmax(-1) if scoring_func == "softmax" else logits.sigmoid(),
        num_expert_group,
        topk_group,
        topk,
        renormalize,
        routed_scaling_factor,
        e_score_correction_bias,
        0,  # these are scores already
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
    """Sort rows by expert and pad each expert's rows to whole blocks.

    The kernels write outside their memory for an invalid id. Therefore rows without an expert on
    this rank get the extra expert of `in_powers`. Invalid ids raise IndexError on the CPU only.
    """
    if not topk_ids.numel():
        none = topk_ids.new_empty(0, dtype=torch.int32)
        return none, none.clone(), none.new_zeros(1)
    ids, absent = of_experts(topk_ids, num_experts)
    if expert_map is not None and ignore_invalid_experts:
        ids, expert_map = expert_map[ids], None
        absent = absent | (ids < 0)
    ids = ids.masked_fill(absent, num_experts)
    return in_powers(ids, block_size, num_experts, expert_map, pad_sorted_ids, absent.sum())


def in_powers(
    ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    pad_sorted_ids: bool = False,
    absent: torch.Tensor | int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run FlagGems's `moe_align_block_size` with added rows, up to a power of two.

    Its kernels are compiled for each number of rows. The added rows, and `absent` other rows, have
    an extra expert, `num_experts`. Its blocks are after all others and are removed.
    """
    rows = ids.numel()
    length = places(rows, block_size, num_experts, pad_sorted_ids)
    padded = ids.new_full((power_of_two(rows),), num_experts)
    padded[:rows] = ids.flatten()
    order, experts, used = flag_gems().moe_align_block_size(padded, block_size, num_experts + 1)
    used -= (absent + len(padded) - rows + block_size - 1) // block_size * block_size
    experts = experts[: -(-length // block_size)]
    if expert_map is not None:
        # The extra expert's blocks are after the used blocks, so their result is not read.
        experts = expert_map[experts.clamp(max=num_experts - 1)]
    return order[:length].clamp(max=rows), experts, used


def moe_sum(
    input: torch.Tensor,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum over each token's experts in fp32, rounded once. Not supported: `topk_ids`."""
    gems = flag_gems()
    out = input.new_empty((input.shape[0], input.shape[2]))
    if out.numel():
        # The kernel assumes contiguous features.
        gems.moe_sum(input if input.stride(-1) == 1 else input.contiguous(), out)
    return out


def of_experts(topk_ids: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids clamped to valid experts, mask of the changed positions).

    An invalid id raises IndexError on the CPU only.
    """
    check_ids(topk_ids, count)
    ids = topk_ids.clamp(0, count - 1)
    return ids, ids != topk_ids


def check_ids(topk_ids: torch.Tensor, count: int) -> None:
    """Raise IndexError for an invalid id, on the CPU only: a check waits for the device."""
    if topk_ids.is_cpu and topk_ids.numel() and int(topk_ids.max()) >= count:
        raise IndexError(f"topk_ids must be below {count}, got {int(topk_ids.max())}")


OPS = (
    implementation(
        moe_topk,
        "scoring_func == 'softmax'",
        "e_score_correction_bias is None",
        f"experts <= {MOST_EXPERTS} and topk <= {MOST}",
    ),
    implementation(
        grouped_topk,
        "e_score_correction_bias is not None",
        f"num_expert_group <= {MOST}",
        "topk in (1, 2, 4, 8, 16, 32)",
    ),
    implementation(moe_align_block_size),
    implementation(moe_sum, "topk_ids is None"),
)
