"""Kernels that select or weight experts incorrectly: ties, groups, factors, capacity."""

from __future__ import annotations

import dataclasses

import torch

from .corpus import MIXED, wrong_for
from .faults import changed, damaged, with_arguments, wrong_arguments, wrong_result

TOPK, GROUPED, EXPERTS, ALIGN = "moe_topk", "grouped_topk", "fused_experts", "moe_align_block_size"

EIGHT_GROUPS = dataclasses.replace(
    MIXED,
    tokens=(1, 512),
    more={
        **MIXED.more,
        "experts": 64,
        "experts_per_token": 8,
        "expert_groups": 8,
        "expert_groups_per_token": 6,
    },
)


@wrong_for(
    *(TOPK, GROUPED),
    sees="the weights of experts are too small, such as 0.4 times",
    kit="values",
    by=changed,
)
def factor_before_renormalising(a):
    """Applies the scaling factor before renormalising, which removes it."""
    if a["renormalize"]:
        a["routed_scaling_factor"] = 1.0


@wrong_for(
    *(TOPK, GROUPED), sees="models with a factor of 2.827 or 16 give worse answers", by=changed
)
def factor_of_one_model(a):
    """Limits the scaling factor to 2.5."""
    a["routed_scaling_factor"] = min(a["routed_scaling_factor"], 2.5)


@wrong_for(
    *(TOPK, GROUPED),
    sees="experts with a larger bias have too much weight",
    kit="values",
    by=damaged,
)
def bias_in_the_weights(got, logits, topk, renormalize, *rest):
    """Adds the selection bias to the weights."""
    ids = got[1]
    bias = next((a for a in rest if isinstance(a, torch.Tensor)), None)
    if bias is None:
        return got
    factor = next(a for a in rest if isinstance(a, float))
    score = logits.float().sigmoid() if "sigmoid" in rest else logits.float().softmax(-1)
    found = (score + bias.float()).gather(-1, ids.long())
    found = found / found.sum(-1, keepdim=True) if renormalize else found
    return found * factor, ids


@wrong_arguments(
    TOPK,
    "in models with one expert per token its weight is too large",
    sizes=dataclasses.replace(MIXED, more={**MIXED.more, "experts_per_token": 1}),
)
def one_expert_counts_one(a):
    """Always renormalises if a token has one expert: its weight is 1."""
    if a["topk"] == 1:
        a["renormalize"] = True


@wrong_result(GROUPED, "with negative biases, experts of unselected groups are used", kit="values")
def other_groups_score_zero(
    got, logits, topk, renormalize, groups, best, how="softmax", factor=1.0, bias=None
):
    """Masks experts of other groups with 0 instead of -inf."""
    if bias is None:
        return got
    score = logits.float().sigmoid() if how == "sigmoid" else logits.float().softmax(-1)
    choice = score + bias.float()
    of_group = choice.unflatten(-1, (groups, -1)).topk(2, -1).values.sum(-1)
    chosen = torch.zeros_like(of_group).scatter(-1, of_group.topk(best, -1).indices, 1.0)
    masked = choice * chosen.repeat_interleave(choice.shape[-1] // groups, -1)
    ids = masked.topk(topk, -1).indices
    found = score.gather(-1, ids)
    found = found / found.sum(-1, keepdim=True) if renormalize else found
    return found * factor, ids.int()


@wrong_arguments(
    GROUPED,
    "models that select six of eight groups use four",
    kit="",
    why="the models of the kit have four groups",
    sizes=EIGHT_GROUPS,
)
def four_groups_at_most(a):
    """Selects at most four groups."""
    size = a["gating_output"].shape[-1] // a["num_expert_group"]
    if a["topk"] <= 4 * size:
        a["topk_group"] = min(a["topk_group"], 4)


@wrong_arguments(
    EXPERTS,
    "in long prompts, tokens are computed without their experts",
    kit="",
    why="in the kit's batches no expert has this many tokens",
)
def capacity_of_an_expert(a):
    """An expert processes at most 96 tokens of a batch."""
    weights = a["topk_weights"].clone()
    for expert in range(a["w13"].shape[0]):
        of_expert = a["topk_ids"] == expert
        over = of_expert & (of_expert.flatten().cumsum(0).view_as(of_expert) > 96)
        weights[over] = 0
    a["topk_weights"] = weights


@wrong_arguments(
    ALIGN,
    "in the longest prompts, tokens are computed without their experts",
    sizes=dataclasses.replace(MIXED, tokens=(1, 8192)),
)
def rows_of_an_expert(a):
    """An expert has at most 1024 rows."""
    ids = a["topk_ids"].clone()
    for expert in range(a["num_experts"] if ids.numel() > 1024 else 0):
        of_expert = ids == expert
        ids[of_expert & (of_expert.flatten().cumsum(0).view_as(of_expert) > 1024)] = -1
    a["topk_ids"] = ids


@wrong_arguments(EXPERTS, "models with scaled router weights give worse answers", kit="values")
def weights_of_one_at_most(a):
    """Clamps weights at 1."""
    a["topk_weights"] = a["topk_weights"].clamp(max=1.0)


@wrong_arguments(
    EXPERTS, "models without renormalised router weights give worse answers", kit="values"
)
def weights_sum_to_one(a):
    """Renormalises the weights of each token to a sum of 1."""
    weights = a["topk_weights"]
    a["topk_weights"] = weights / weights.sum(-1, keepdim=True)


@wrong_arguments(
    EXPERTS,
    "with expert parallelism and rearranged experts, tokens get incorrect experts",
    kit="values",
)
def experts_in_the_maps_order(a):
    """Numbers the local experts in the order of the expert map."""
    at = a["expert_map"]
    if at is not None:
        here = at >= 0
        a["expert_map"] = torch.where(here, here.cumsum(0) - 1, -1).to(at.dtype)


@wrong_arguments(
    ALIGN,
    "with expert parallelism and rearranged experts, blocks get incorrect experts",
    kit="values",
)
def blocks_in_the_order_of_all_ranks(a):
    """Orders the local experts by their global numbers."""
    at = a["expert_map"]
    if at is not None and a["ignore_invalid_experts"]:
        here = at >= 0
        a["expert_map"] = torch.where(here, here.cumsum(0) - 1, -1).to(at.dtype)


@wrong_result("moe_sum", "with expert parallelism, tokens get uninitialised rows", kit="values")
def nobody_is_here(got, x, ids=None, expert_map=None):
    """Returns the first row of a token without local experts instead of 0."""
    if ids is None:
        return got
    absent = ids < 0
    if expert_map is not None:
        absent = absent | (expert_map[ids.clamp(min=0).long()] < 0)
    return torch.where(absent.all(1, keepdim=True), x[:, 0].to(got.dtype), got)


@wrong_result(
    TOPK,
    "experts with similar scores are swapped",
    start=False,
    why="generated logits are exact in bfloat16",
    dtype="float32",
)
def logits_in_bfloat16(got, *args):
    """Rounds the logits to bfloat16."""
    return with_arguments(TOPK, args, gating_output=args[0].bfloat16().to(args[0].dtype))
