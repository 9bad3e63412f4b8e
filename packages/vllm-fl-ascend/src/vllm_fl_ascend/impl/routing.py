"""Routing of mixtures of experts, on torch_npu's kernels."""

from __future__ import annotations

import torch

from . import implementation

__all__ = ["OPS", "grouped_topk", "moe_topk"]

SCORING_NUMBERS = {"softmax": 0, "sigmoid": 1}
"""Numbers of the functions in `npu_moe_gating_top_k`."""


def moe_topk(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's experts with the highest scores, by `npu_moe_gating_top_k`, in fp32.

    Supports 3 to 2048 experts. Sigmoid is supported only with `renormalize`; an unknown score
    raises KeyError.
    """
    groups = (1, 1, 0)
    scale = (renormalize, scoring_func, routed_scaling_factor)
    return _route(gating_output, topk, groups, *scale, e_score_correction_bias)


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
    """Return the best experts of each token's best groups, by `npu_moe_gating_top_k`, in fp32.

    Groups must have 3 or more experts. With group sizes rounded up to multiples of 32, there may be
    at most 2048 experts. Sigmoid is supported only with `renormalize`; an unknown score raises
    KeyError.
    """
    by_two = e_score_correction_bias is not None
    groups = (num_expert_group, topk_group, int(by_two))
    scale = (renormalize, scoring_func, routed_scaling_factor)
    return _route(gating_output, topk, groups, *scale, e_score_correction_bias)


def _route(
    gating_output: torch.Tensor,
    topk: int,
    groups: tuple[int, int, int],
    renormalize: bool,
    scoring_func: str,
    factor: float,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = gating_output.float()  # the weights have the logits' dtype
    if not logits.numel():
        shape = (logits.shape[0], topk)
        return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int32)
    of_softmax = scoring_func == "softmax"
    count, best, mode = groups
    weights, ids, _scores = torch.ops.npu.npu_moe_gating_top_k.default(
        logits,
        topk,
        bias=None if bias is None else bias.float(),
        k_group=best,
        group_count=count,
        group_select_mode=mode,
        renorm=0,
        norm_type=SCORING_NUMBERS[scoring_func],
        routed_scaling_factor=1.0 if of_softmax else factor,
    )
    if of_softmax and renormalize:  # the kernel renormalises for sigmoid only
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * factor if of_softmax and factor != 1.0 else weights, ids


SCALED = "scoring_func == 'softmax' or renormalize"
"""The kernel always renormalises the weights of a sigmoid."""

# The kernel rounds group sizes up to multiples of 32 experts.
OPS = (
    implementation(moe_topk, SCALED, "3 <= experts <= 2048"),
    implementation(
        grouped_topk,
        SCALED,
        "experts >= 3 * num_expert_group",
        "-(-experts // num_expert_group // 32) * 32 * num_expert_group <= 2048",
    ),
)
