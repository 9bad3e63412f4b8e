"""Routing (as in vLLM's CPU build), block alignment and sum of a mixture of experts."""

from __future__ import annotations

import math

import torch

from . import implementations

__all__ = ["OPS", "grouped_topk", "moe_align_block_size", "moe_sum", "moe_topk"]


def moe_topk(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts with the highest scores of each token, and their weights."""
    logits = gating_output.float()
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
    """Return the best experts of each token's best groups, and their weights."""
    logits = gating_output.float()
    experts = logits.shape[-1]
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


def moe_align_block_size(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort rows by expert, ascending, and pad each expert's rows to whole blocks."""
    rows = topk_ids.numel()
    most = rows + num_experts * (block_size - 1)
    if pad_sorted_ids:
        most = (most + block_size - 1) // block_size * block_size
    length = torch.sym_min(rows * block_size, most)

    numbers = topk_ids.flatten().long()
    if expert_map is not None and ignore_invalid_experts:
        here = expert_map[numbers.clamp(min=0)].long()
        numbers = torch.where(numbers < 0, numbers, here)
    experts, order = numbers.masked_fill(numbers < 0, num_experts).sort(stable=True)
    counts = experts.new_zeros(num_experts + 1).scatter_add_(0, experts, torch.ones_like(experts))
    ends = ((counts[:num_experts] + block_size - 1) // block_size).cumsum(0)  # in blocks
    starts = torch.cat((ends.new_zeros(1), ends)) * block_size
    rank = torch.arange(rows, device=experts.device) - (counts.cumsum(0) - counts)[experts]

    # Rows without an expert are written after all others and removed.
    place = torch.where(experts < num_experts, starts[experts] + rank, length)
    padding = torch.full((length + 1,), rows, dtype=torch.int32, device=experts.device)
    sorted_token_ids = padding.scatter(0, place, order.int())[:length]
    blocks = torch.arange((length + block_size - 1) // block_size, device=experts.device)
    of_blocks = torch.searchsorted(ends, blocks, right=True)
    in_use = of_blocks < num_experts
    if expert_map is not None and not ignore_invalid_experts:
        of_blocks = expert_map[of_blocks.clamp(max=num_experts - 1)].long()
    expert_ids = torch.where(in_use, of_blocks, -1).int()
    return sorted_token_ids, expert_ids, starts[-1:].int()


def moe_sum(
    input: torch.Tensor,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum over each token's experts on this rank; PyTorch adds in fp32."""
    if topk_ids is None:
        return input.sum(dim=1)
    here = topk_ids >= 0
    if expert_map is not None:
        here = here & (expert_map[topk_ids.clamp(min=0).long()] >= 0)
    return input.masked_fill(~here.unsqueeze(-1), 0.0).sum(dim=1)


def _scores(logits: torch.Tensor, scoring_func: str) -> torch.Tensor:
    return logits.softmax(-1) if scoring_func == "softmax" else logits.sigmoid()


def _scaled(weights: torch.Tensor, factor: float) -> torch.Tensor:
    return weights if factor == 1.0 else weights * factor


OPS = implementations(moe_topk, grouped_topk, moe_align_block_size, moe_sum)
