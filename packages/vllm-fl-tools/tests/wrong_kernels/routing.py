"""Wrong in whom it chooses, and by how much: ties, groups, factors, capacity."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .corpus import MIXED, wrong_for, wrong_kernel
from .faults import changed, spoilt, with_arguments

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
    fault="the factor multiplies the weights before they are renormalised, and is lost",
    sees="experts count two fifths of what they should",
    kit="values",
)
def factor_before_renormalising(op: str) -> Any:
    def change(a):
        if a["renormalize"]:
            a["routed_scaling_factor"] = 1.0

    return changed(op, change)


@wrong_for(
    *(TOPK, GROUPED),
    fault="a factor above 2.5 is taken for 2.5",
    sees="models whose factor is 2.827, or 16, answer worse",
)
def factor_of_one_model(op: str) -> Any:
    def change(a):
        a["routed_scaling_factor"] = min(a["routed_scaling_factor"], 2.5)

    return changed(op, change)


@wrong_for(
    *(TOPK, GROUPED),
    fault="the bias of the choice is part of the weights",
    sees="experts that were to be chosen more often also count more",
    kit="values",
)
def bias_in_the_weights(op: str) -> Any:
    def spoil(got, logits, topk, renormalize, *rest):
        ids = got[1]
        bias = next((a for a in rest if isinstance(a, torch.Tensor)), None)
        if bias is None:
            return got
        factor = next(a for a in rest if isinstance(a, float))
        score = logits.float().sigmoid() if "sigmoid" in rest else logits.float().softmax(-1)
        found = (score + bias.float()).gather(-1, ids.long())
        found = found / found.sum(-1, keepdim=True) if renormalize else found
        return found * factor, ids

    return spoilt(op, spoil)


@wrong_kernel(
    TOPK,
    "the one expert of a token has the weight 1, renormalised or not",
    "models that take one expert for a token let it count too much",
    sizes=dataclasses.replace(MIXED, more={**MIXED.more, "experts_per_token": 1}),
    by=changed,
)
def one_expert_counts_one(a):
    if a["topk"] == 1:
        a["renormalize"] = True


@wrong_kernel(
    GROUPED,
    "experts of other groups have the score 0 instead of none",
    "where biases are negative, experts of groups that were not chosen are taken",
    kit="values",
    sizes=MIXED,
    by=spoilt,
)
def other_groups_score_zero(
    got, logits, topk, renormalize, groups, best, how="softmax", factor=1.0, bias=None
):
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


@wrong_kernel(
    GROUPED,
    "takes four groups at most",
    "models that choose among six of eight groups use four",
    kit="",
    why="the models of the kit choose among four groups",
    sizes=EIGHT_GROUPS,
    by=changed,
)
def four_groups_at_most(a):
    size = a["gating_output"].shape[-1] // a["num_expert_group"]
    if a["topk"] <= 4 * size:
        a["topk_group"] = min(a["topk_group"], 4)


@wrong_kernel(
    EXPERTS,
    "an expert takes 96 tokens of a batch; the others lose it",
    "in long prompts tokens are answered without their experts",
    kit="",
    why="the kit's batches give no expert so many tokens",
    sizes=MIXED,
    by=changed,
)
def capacity_of_an_expert(a):
    weights = a["topk_weights"].clone()
    for expert in range(a["w13"].shape[0]):
        of_expert = a["topk_ids"] == expert
        over = of_expert & (of_expert.flatten().cumsum(0).view_as(of_expert) > 96)
        weights[over] = 0
    a["topk_weights"] = weights


@wrong_kernel(
    ALIGN,
    "an expert has 1024 rows at most",
    "in the longest prompts tokens are answered without their experts",
    sizes=dataclasses.replace(MIXED, tokens=(1, 8192)),
    by=changed,
)
def rows_of_an_expert(a):
    ids = a["topk_ids"].clone()
    for expert in range(a["num_experts"] if ids.numel() > 1024 else 0):
        of_expert = ids == expert
        ids[of_expert & (of_expert.flatten().cumsum(0).view_as(of_expert) > 1024)] = -1
    a["topk_ids"] = ids


@wrong_kernel(
    EXPERTS,
    "weights above 1 count as 1",
    "models whose router scales its weights answer worse",
    kit="values",
    sizes=MIXED,
    by=changed,
)
def weights_of_one_at_most(a):
    a["topk_weights"] = a["topk_weights"].clamp(max=1.0)


@wrong_kernel(
    EXPERTS,
    "the weights of a token are made to sum to 1",
    "models whose router leaves its weights as they are answer worse",
    kit="values",
    sizes=MIXED,
    by=changed,
)
def weights_sum_to_one(a):
    weights = a["topk_weights"]
    a["topk_weights"] = weights / weights.sum(-1, keepdim=True)


@wrong_kernel(
    EXPERTS,
    "the experts that are here are numbered in the order in which the map has them",
    "with expert parallelism and replaced experts a token goes to others'",
    kit="values",
    sizes=MIXED,
    by=changed,
)
def experts_in_the_maps_order(a):
    at = a["expert_map"]
    if at is not None:
        here = at >= 0
        a["expert_map"] = torch.where(here, here.cumsum(0) - 1, -1).to(at.dtype)


@wrong_kernel(
    ALIGN,
    "the experts that are here come in the order of their numbers over all ranks",
    "with expert parallelism and replaced experts blocks go to others'",
    kit="values",
    sizes=MIXED,
    by=changed,
)
def blocks_in_the_order_of_all_ranks(a):
    at = a["expert_map"]
    if at is not None and a["ignore_invalid_experts"]:
        here = at >= 0
        a["expert_map"] = torch.where(here, here.cumsum(0) - 1, -1).to(at.dtype)


@wrong_kernel(
    "moe_sum",
    "a token whose experts are all elsewhere has what its first place holds",
    "with expert parallelism tokens get rows that nobody computed",
    kit="values",
    sizes=MIXED,
    by=spoilt,
)
def nobody_is_here(got, x, ids=None, expert_map=None):
    if ids is None:
        return got
    absent = ids < 0
    if expert_map is not None:
        absent = absent | (expert_map[ids.clamp(min=0).long()] < 0)
    return torch.where(absent.all(1, keepdim=True), x[:, 0].to(got.dtype), got)


@wrong_kernel(
    TOPK,
    "scores are those of the logits in bfloat16",
    "experts that are close to each other are confused",
    start=False,
    why="logits that are made are exact in bfloat16",
    sizes=MIXED,
    dtype="float32",
    by=spoilt,
)
def logits_in_bfloat16(got, *args):
    return with_arguments(TOPK, args, gating_output=args[0].bfloat16().to(args[0].dtype))
