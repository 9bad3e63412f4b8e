"""DeepSeek's routing: the best experts of each token, from its best groups of experts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.arguments import flag, integer, scalar, tensor, word
from vllm_fl.contracts.outputs import Routing
from vllm_fl.contracts.sampling import Source
from vllm_fl.contracts.spec import ModelSizes, Sample, Tolerance

from .common import contract, not_finite, of_layer
from .routing import (
    EXPERT_RESULTS,
    SCORE_MARGIN,
    SCORING,
    bias_for_choice,
    by_argmax,
    highest,
    router_logits,
    scored,
)

if TYPE_CHECKING:
    import torch


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
    """The `topk` best experts of the `topk_group` best groups of each token, and their weights.

    Scores are softmax(gating_output) or sigmoid(gating_output) over all experts, in fp32. A group
    is a range of consecutive experts. With a bias, experts are chosen by score + bias, and groups
    by the sum of their two highest values of score + bias. Without a bias, experts are chosen by
    score, and groups by their highest score. Weights are the scores without the bias.

    Args:
        gating_output: (tokens, experts), the router's logits without unit: float32, float16 or
            bfloat16, of any layout. The result of a token with a logit that is not finite is
            unspecified, and affects no other token.
        topk: the number of experts of a token, from 1 to the number of experts in topk_group
            groups.
        renormalize: whether to divide a token's weights by their sum. If all chosen scores of a
            token are below 1e-6, its weights are then unspecified, because kernels add small
            numbers to the sum.
        num_expert_group: the number of groups, of equal size; with a bias, of at least two experts.
        topk_group: the number of groups to choose a token's experts from, 1 to num_expert_group.
        scoring_func: "softmax" or "sigmoid".
        routed_scaling_factor: a finite factor of the weights, applied last.
        e_score_correction_bias: (experts,), finite, float32, float16 or bfloat16, or None.

    Returns:
        (weights, ids), both (tokens, topk) and contiguous, on gating_output's device. weights is
        float32; ids is int32 from 0 to experts - 1, distinct for each token. A token's experts may
        be in any order. Between equal scores, or equal groups, any choice is correct. The inputs
        are not modified.

    Raises:
        CallError: an argument violates this contract.

    Source: DeepSeek-V3 (arXiv:2412.19437), section 2.1.2, and its published code; vLLM's
    `grouped_topk`.
    """
    scores = scored(gating_output, scoring_func)
    allowed = _allowed(scores, num_expert_group, topk_group, e_score_correction_bias)
    ids = highest(allowed, topk)
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * routed_scaling_factor, ids.int()


def _allowed(
    scores: torch.Tensor, groups: int, topk_group: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the numbers that decide the choice of experts: -inf outside the chosen groups."""
    import torch

    choice = (scores if bias is None else scores + bias.double()).unflatten(-1, (groups, -1))
    worth = choice.amax(-1) if bias is None else choice.topk(2, dim=-1).values.sum(-1)
    taken = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, highest(worth, topk_group), True)
    allowed: torch.Tensor = choice.masked_fill(~taken.unsqueeze(-1), -math.inf).flatten(-2)
    return allowed


def _scores(*call: Any) -> torch.Tensor:
    gating_output, _, _, num_expert_group, topk_group, scoring_func, _, bias = call
    return _allowed(scored(gating_output, scoring_func), num_expert_group, topk_group, bias)


def _by_token(*call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    gating_output, topk, renormalize, num_expert_group, topk_group, *rest = call
    scoring_func, routed_scaling_factor, e_score_correction_bias = rest
    wide = gating_output.double()
    if scoring_func == "softmax":
        scores = (wide - wide.logsumexp(-1, keepdim=True)).exp()
    else:
        scores = 1 / (1 + (-wide).exp())
    size = wide.shape[1] // num_expert_group
    weights = wide.new_empty((len(wide), topk))
    ids = wide.new_empty((len(wide), topk), dtype=torch.int32)
    for token, own in enumerate(scores):
        choice = own.clone()
        if e_score_correction_bias is not None:
            choice += e_score_correction_bias.double()
        counted = 1 if e_score_correction_bias is None else 2
        members = choice.split(size)
        worth = torch.stack([each.sort().values[-counted:].sum() for each in members])
        best = set(by_argmax(worth, topk_group).tolist())
        for group, each in enumerate(members):
            if group not in best:
                each.fill_(-math.inf)
        ids[token] = by_argmax(choice, topk)
        mine = own[ids[token].long()]
        weights[token] = mine * routed_scaling_factor / (mine.sum() if renormalize else 1)
    return weights, ids


def _samples(source: Source) -> Iterator[Sample]:
    sizes = (6, True, 8, 3)
    one = router_logits(source, 1, 64)
    yield Sample("1 token", (one, *sizes, "softmax", 1.0, None))
    some = router_logits(source, 16, 64)
    yield Sample("16 tokens", (some, *sizes, "softmax", 1.0, None))
    nothing = router_logits(source, 0, 64)
    yield Sample("0 tokens", (nothing, *sizes, "softmax", 1.0, None))
    odd = router_logits(source, 7, 35)
    yield Sample("odd sizes, plain", (odd, 3, False, 5, 2, "softmax", 16.0, None))
    one = router_logits(source, 20, 16)
    yield Sample("one expert, plain", (one, 1, False, 4, 2, "sigmoid", 1.0, None))
    every = router_logits(source, 5, 24)
    yield Sample("every group, plain", (every, 5, False, 4, 4, "sigmoid", 1.5, None))
    strided = router_logits(source, 12, 80)[::2, 8:72]
    yield Sample("every other row of a slice", (strided, *sizes, "sigmoid", 1.0, None))
    bias = bias_for_choice(source, 256, 0.1)
    deepseek = router_logits(source, 9, 256)
    yield Sample("DeepSeek-V3", (deepseek, 8, True, 8, 4, "sigmoid", 2.5, bias))
    bias = bias_for_choice(source, 64, 0.3)
    yield Sample("bias, plain, scaled", (some[:9].clone(), 4, False, 4, 2, "sigmoid", 1.5, bias))
    bias = bias_for_choice(source, 64, 0.02)
    yield Sample("softmax with bias", (some[:9].clone(), 4, True, 4, 2, "softmax", 1.5, bias))
    bias = bias_for_choice(source, 64, 0.3) - 2.0
    yield Sample("bias below 0", (some[:9].clone(), 8, True, 8, 2, "sigmoid", 1.0, bias))
    bias = bias_for_choice(source, 60, 0.3)
    one_group = router_logits(source, 5, 60)
    yield Sample("one group", (one_group, 6, True, 1, 1, "sigmoid", 1.0, bias))
    pairs = router_logits(source, 5, 16)
    yield Sample("groups of two", (pairs, 3, True, 8, 2, "softmax", 1.0, None))
    small = router_logits(source, 4, 195)
    yield Sample("many small groups", (small, 6, True, 65, 3, "softmax", 1.0, None))
    ties = router_logits(source, 6, 16)
    ties[:, 3] = ties[:, 8] = ties[:, 12] = 4.5  # equal scores in three groups
    ties[:, 5] = 6.0
    yield Sample("ties", (ties, 3, True, 4, 4, "softmax", 1.0, None))
    equal = router_logits(source, 6, 32, spread=0.125)
    equal[:, [0, 1, 8, 9, 16, 17]] = equal.new_tensor((2.0, 2.0, 1.5, 1.4, 1.25, 1.2))
    args = (equal, 4, True, 4, 2, "sigmoid", 1.0, bias_for_choice(source, 32, 0.0))
    yield Sample("two equal highest scores in a group", args)
    bias = bias_for_choice(source, 64, 0.1)
    broken = router_logits(source, 5, 64)
    broken[1, 7], broken[3, 40], broken[4] = math.nan, math.inf, -math.inf
    args = (broken, 4, True, 8, 4, "sigmoid", 1.0, bias)
    yield Sample("NaN and infinity", args, open_rows=(1, 3, 4))


def _served(
    source: Source,
    sizes: ModelSizes,
    experts: int,
    experts_per_token: int,
    expert_groups: int,
    expert_groups_per_token: int,
) -> Iterator[Sample]:
    import torch

    topk, groups, best = experts_per_token, expert_groups, expert_groups_per_token
    large = ", large" * source.large
    bias = bias_for_choice(source, experts, 0.1)
    # Routers with a bias return logits in fp32.
    kinds = {"sigmoid": torch.float32, "softmax": source.dtype}
    for how in ("sigmoid", "softmax"):
        for tokens in sizes.tokens:
            own = Source(kinds[how], source.device, source.large)
            logits = router_logits(own, tokens, experts, spread=4.0 if source.large else 1.0)
            rest = ("sigmoid", 2.5, bias) if how == "sigmoid" else ("softmax", 1.0, None)
            name = f"{topk} of {tokens} x {experts} in {best} of {groups}, {how}{large}"
            args = (logits, topk, True, groups, best, *rest)
            if SPEC.check(*args) is None:  # otherwise the model's experts are not in groups
                yield Sample(name, args)


GROUPS = (
    "value >= 1 and experts % value == 0 "
    "and (e_score_correction_bias is None or experts >= 2 * value)"
)


def _bad(good: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    logits = good["gating_output"]
    yield "three dimensions, the last empty", {"gating_output": logits[..., None][..., :0]}
    yield from not_finite("routed_scaling_factor")
    biased = {"scoring_func": "sigmoid", "e_score_correction_bias": logits[0].clone()}
    for name, value in (
        ("topk", 0),
        ("topk", 63),
        ("num_expert_group", 0),
        ("num_expert_group", 7),
        ("num_expert_group", 64),
        ("topk_group", 0),
        ("topk_group", 9),
        ("scoring_func", "tanh"),
    ):
        yield f"{name} of {value}, with a bias", biased | {name: value}


SPEC = contract(
    grouped_topk,
    {
        "gating_output": tensor("tokens, experts", where="experts >= 1"),
        "num_expert_group": integer(GROUPS),
        "topk_group": integer("1 <= value <= num_expert_group"),
        "topk": integer("1 <= value <= topk_group * (experts // num_expert_group)"),
        "renormalize": flag(),
        "scoring_func": word(*SCORING),
        "routed_scaling_factor": scalar(),
        "e_score_correction_bias": tensor("experts").optional(),
    },
    EXPERT_RESULTS,
    bad=_bad,
    **of_layer(
        "topk",
        "renormalize",
        "num_expert_group",
        "topk_group",
        "scoring_func",
        "routed_scaling_factor",
    ),
    group="moe",
    samples=_samples,
    served=_served,
    second_form=_by_token,
    tolerances={
        "float32": Tolerance(
            2e-5,
            1e-7,
            "computed in fp32 for all dtypes of logits; room for a sigmoid by a fast exp or tanh, "
            "and for up to 1e-8 that some kernels add to a sum of scores",
        )
    },
    dtypes=("float32", "float16", "bfloat16"),
    outputs=(Routing(_scores, margin=SCORE_MARGIN),),
)
