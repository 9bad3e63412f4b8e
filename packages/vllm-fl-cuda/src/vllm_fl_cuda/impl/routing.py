"""The routing of mixtures of experts, on vLLM's CUDA kernels."""

from __future__ import annotations

import torch

from vllm_fl import Availability, OpImpl

from . import VENDOR, kernel, packed, provides, unsuitable

__all__ = ["OPS", "grouped_topk", "moe_topk", "supports_grouped_topk", "supports_moe_topk"]

SCORING = ("softmax", "sigmoid")

SPECIAL_SIZES = frozenset({1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 576})
"""Numbers of experts for which there is a kernel of their own. The one for other numbers looks for
a score above -1, and takes expert 0 again where a bias leaves none."""

MOST = 32
"""Groups, and experts of a token, that the grouped kernel takes."""


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
    kernel(name)(weights, ids, rows, logits, renormalize, bias, *factor, *_no_padding(name))
    if not factor and routed_scaling_factor != 1.0:
        weights *= routed_scaling_factor
    return weights, ids


def _no_padding(name: str) -> tuple[None, ...]:
    """What says that no token is padding, to a release that asks."""
    arguments = kernel(name)._schema.arguments  # type: ignore[attr-defined]
    return (None,) if arguments[-1].name == "is_padding" else ()


def supports_moe_topk(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> Availability:
    """True, or why the kernels would fail, or choose wrongly."""
    reason = unsuitable("gating_output", gating_output) or _unfit(
        gating_output, scoring_func, routed_scaling_factor, e_score_correction_bias
    )
    if reason:
        return reason
    experts = gating_output.shape[1]
    if not 1 <= topk <= experts:
        return f"topk={topk} of {experts} experts"
    if e_score_correction_bias is not None and experts not in SPECIAL_SIZES:
        return f"no kernel for {experts} experts sees every score that a bias leaves"
    return True


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


def supports_grouped_topk(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int,
    topk_group: int,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> Availability:
    """True, or why the kernel would fail, or count groups otherwise."""
    reason = unsuitable("gating_output", gating_output) or _unfit(
        gating_output, scoring_func, routed_scaling_factor, e_score_correction_bias
    )
    if reason:
        return reason
    if e_score_correction_bias is None:
        return "the kernel has no form without e_score_correction_bias"
    experts, groups = gating_output.shape[1], num_expert_group
    if not 1 <= groups <= MOST or experts % groups or experts < 2 * groups:
        return f"no kernel for {experts} experts in {groups} groups"
    if not 1 <= topk_group <= groups or not 1 <= topk <= min(MOST, topk_group * experts // groups):
        return f"no kernel for {topk} experts of {topk_group} groups"
    return True


def _unfit(
    logits: torch.Tensor, scoring_func: str, factor: float, bias: torch.Tensor | None
) -> str | None:
    if logits.ndim != 2:
        return f"gating_output has {logits.ndim} dimensions"
    if scoring_func not in SCORING:
        return f"no kernel for {scoring_func}"
    if not abs(factor) < float("inf"):
        return f"routed_scaling_factor={factor} is not finite"
    if bias is None:
        return None
    if bias.shape != logits.shape[1:] or bias.device != logits.device:
        return f"e_score_correction_bias is {tuple(bias.shape)} on {bias.device}"
    return unsuitable("e_score_correction_bias", bias)


OPS = (
    OpImpl(
        "moe_topk",
        *VENDOR,
        moe_topk,
        "cuda",
        available=provides("_moe_C::topk_softmax", "_moe_C::topk_sigmoid"),
        supports=supports_moe_topk,
    ),
    OpImpl(
        "grouped_topk",
        *VENDOR,
        grouped_topk,
        "cuda",
        available=provides("_moe_C::grouped_topk"),
        supports=supports_grouped_topk,
    ),
)
