"""The routing of mixtures of experts, as vLLM's CPU build computes it in PyTorch, in fp32."""

from __future__ import annotations

import math

import torch

from . import implementations

__all__ = ["OPS", "grouped_topk", "moe_topk"]


def moe_topk(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token with the highest scores, and their weights.

    Args:
        gating_output: (tokens, experts), floating.
        topk: from 1 to experts.
        renormalize: whether a token's weights are divided by their sum.
        scoring_func: "softmax" or "sigmoid".
        routed_scaling_factor: a finite number.
        e_score_correction_bias: (experts,), floating, or None.

    Returns:
        (weights, float32; ids, int32), both (tokens, topk).

    Raises:
        TypeError: gating_output is not floating or has other dimensions, or a number is none.
        ValueError: the bias is not such a tensor, topk is below 1, the factor is not finite, or
            scoring_func is another word.
        RuntimeError: topk is above experts.
    """
    logits = _logits(gating_output, topk, routed_scaling_factor, e_score_correction_bias)
    if scoring_func == "softmax" and e_score_correction_bias is None:
        chosen, ids = logits.topk(topk, dim=-1, sorted=False)
        if renormalize:
            weights = chosen.softmax(-1)
        else:
            weights = (chosen - logits.logsumexp(-1, keepdim=True)).exp()
    else:
        scores = _scores(logits, scoring_func)
        if e_score_correction_bias is None:
            weights, ids = scores.topk(topk, dim=-1, sorted=False)
        else:
            ids = (scores + e_score_correction_bias).topk(topk, dim=-1, sorted=False).indices
            weights = scores.gather(-1, ids)
        if renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
    return _scaled(weights, routed_scaling_factor), ids.int()


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
    """The best experts of the best groups of each token, and their weights.

    Args:
        gating_output: (tokens, experts), floating.
        topk: from 1 to the experts of topk_group groups.
        renormalize: whether a token's weights are divided by their sum.
        num_expert_group: a divisor of experts; with a bias, groups have two experts or more.
        topk_group: from 1 to num_expert_group.
        scoring_func: "softmax" or "sigmoid".
        routed_scaling_factor: a finite number.
        e_score_correction_bias: (experts,), floating, or None.

    Returns:
        (weights, float32; ids, int32), both (tokens, topk).

    Raises:
        TypeError: gating_output is not floating or has other dimensions, or a number is none.
        ValueError: the bias is not such a tensor, a number is out of its range, or scoring_func is
            another word.
        RuntimeError: the groups are too small for the bias, or topk_group or topk is too large.
    """
    logits = _logits(gating_output, topk, routed_scaling_factor, e_score_correction_bias)
    experts = logits.shape[-1]
    if num_expert_group < 1 or experts % num_expert_group or topk_group < 1:
        raise ValueError(
            f"num_expert_group must divide the {experts} experts, and topk_group be at least 1, "
            f"got {num_expert_group} and {topk_group}"
        )
    if topk > topk_group * (experts // num_expert_group):  # experts of other groups would be taken
        raise ValueError(f"topk must not exceed the experts of {topk_group} groups, got {topk}")
    scores = _scores(logits, scoring_func)
    choice = scores if e_score_correction_bias is None else scores + e_score_correction_bias
    groups = choice.view(choice.shape[0], num_expert_group, experts // num_expert_group)
    if e_score_correction_bias is None:
        worth = groups.max(dim=-1).values
    else:
        worth = groups.topk(2, dim=-1).values.sum(dim=-1)
    best = worth.topk(topk_group, dim=-1, sorted=False).indices
    taken = torch.zeros_like(worth).scatter_(1, best, 1).bool()
    allowed = groups.masked_fill(~taken.unsqueeze(-1), -math.inf).flatten(-2)
    chosen, ids = allowed.topk(topk, dim=-1, sorted=False)
    weights = chosen if e_score_correction_bias is None else scores.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return _scaled(weights, routed_scaling_factor), ids.int()


def _logits(
    gating_output: torch.Tensor, topk: int, factor: float, bias: torch.Tensor | None
) -> torch.Tensor:
    if not gating_output.is_floating_point() or gating_output.ndim != 2:
        raise TypeError(
            "gating_output must be floating, (tokens, experts), got "
            f"{gating_output.dtype} of {gating_output.ndim} dimensions"
        )
    if bias is not None and (not bias.is_floating_point() or bias.shape != gating_output.shape[1:]):
        raise ValueError(
            f"e_score_correction_bias must be floating, (experts,), got {bias.dtype} of the shape "
            f"{tuple(bias.shape)}"
        )
    if topk < 1:
        raise ValueError(f"topk must be at least 1, got {topk}")
    if not -math.inf < factor < math.inf:  # isfinite cannot be traced
        raise ValueError(f"routed_scaling_factor must be finite, got {factor}")
    return gating_output.float()


def _scores(logits: torch.Tensor, scoring_func: str) -> torch.Tensor:
    if scoring_func == "softmax":
        return logits.softmax(-1)
    if scoring_func == "sigmoid":
        return logits.sigmoid()
    raise ValueError(f"scoring_func must be softmax or sigmoid, got {scoring_func!r}")


def _scaled(weights: torch.Tensor, factor: float) -> torch.Tensor:
    return weights if factor == 1.0 else weights * factor


OPS = implementations(moe_topk, grouped_topk)
