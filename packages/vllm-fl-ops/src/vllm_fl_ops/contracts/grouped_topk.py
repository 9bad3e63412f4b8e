"""DeepSeek's routing: a token takes the best experts of its best groups of experts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.checks import Problem
from vllm_fl.contracts.outputs import Routing
from vllm_fl.contracts.sampling import Source
from vllm_fl.contracts.spec import BadInput, ModelSizes, OpSpec, Sample, Tolerance, Variant

from .routing import (
    MARGIN,
    bias_for_choice,
    by_argmax,
    check_bias,
    check_factor,
    check_logits,
    check_scoring,
    check_topk,
    highest,
    router_logits,
    scored,
    whole_number,
)

if TYPE_CHECKING:
    import torch

__all__ = ["SPEC"]


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

    Scores are softmax(gating_output) or sigmoid(gating_output) over all experts, in fp32. Groups
    are neighbouring experts. With a bias, score + bias decides: a group counts as much as its two
    highest together. Without one the score decides, and a group counts as its highest. Weights are
    the scores without the bias.

    Args:
        gating_output: (tokens, experts), the router's logits without unit: float32, float16 or
            bfloat16, of any layout. Nothing is promised for a token with a logit that is not
            finite; it changes nothing for another token.
        topk: how many experts a token takes, from 1 to those of topk_group groups.
        renormalize: whether a token's weights are divided by their sum. Nothing is promised for
            the weights of a token whose chosen scores are all below 1e-6 then: kernels add small
            numbers to the sum.
        num_expert_group: how many groups there are, of equal size; with a bias of two or more.
        topk_group: how many groups a token takes experts of, from 1 to num_expert_group.
        scoring_func: "softmax" or "sigmoid".
        routed_scaling_factor: a finite number that multiplies the weights last.
        e_score_correction_bias: (experts,), finite, float32, float16 or bfloat16, or None.

    Returns:
        (weights, ids), both (tokens, topk) and contiguous, on gating_output's device: float32, and
        int32 from 0 to experts - 1, no expert twice. The order of a token's experts is free, and
        so is which of equal scores, or equal groups, is taken. The inputs are left as they were.

    Raises:
        CallError: an argument is not as said here.

    Source: DeepSeek-V3 (arXiv:2412.19437), section 2.1.2, and its published code; as
    `grouped_topk` of vLLM.
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
    """What decides between experts; -inf for those of the other groups."""
    import torch

    choice = (scores if bias is None else scores + bias.double()).unflatten(-1, (groups, -1))
    worth = choice.amax(-1) if bias is None else choice.topk(2, dim=-1).values.sum(-1)
    taken = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, highest(worth, topk_group), True)
    allowed: torch.Tensor = choice.masked_fill(~taken.unsqueeze(-1), -math.inf).flatten(-2)
    return allowed


def _scores(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int,
    topk_group: int,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    scores = scored(gating_output, scoring_func)
    return _allowed(scores, num_expert_group, topk_group, e_score_correction_bias)


def _by_token(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int,
    topk_group: int,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

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


def _fake(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int,
    topk_group: int,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    shape = (gating_output.shape[0], topk)
    return (
        gating_output.new_empty(shape, dtype=torch.float32),
        gating_output.new_empty(shape, dtype=torch.int32),
    )


def _check(
    gating_output: Any,
    topk: Any,
    renormalize: Any,
    num_expert_group: Any,
    topk_group: Any,
    scoring_func: Any = "softmax",
    routed_scaling_factor: Any = 1.0,
    e_score_correction_bias: Any = None,
) -> Problem:
    return (
        check_logits("gating_output", gating_output)
        or _check_groups(num_expert_group, gating_output.shape[1], e_score_correction_bias)
        or check_topk("topk_group", topk_group, num_expert_group)
        or check_topk("topk", topk, topk_group * (gating_output.shape[1] // num_expert_group))
        or check_scoring(scoring_func)
        or check_factor(routed_scaling_factor)
        or check_bias(e_score_correction_bias, gating_output)
    )


def _check_groups(groups: Any, experts: int, bias: Any) -> Problem:
    name = "num_expert_group"
    problem = whole_number(name, groups)
    if problem is None and (groups < 1 or experts % groups):
        return name, f"must divide the {experts} experts, got {groups}"
    if problem is None and bias is not None and experts < 2 * groups:
        return name, f"must leave two experts for each group, got {groups} for {experts}"
    return problem


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source = Source(dtype, device)
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
    ties[:, 3] = ties[:, 8] = ties[:, 12] = 4.5  # three for the last two places, in three groups
    ties[:, 5] = 6.0
    yield Sample("ties", (ties, 3, True, 4, 4, "softmax", 1.0, None))
    bias = bias_for_choice(source, 64, 0.1)
    broken = router_logits(source, 5, 64)
    broken[1, 7], broken[3, 40], broken[4] = math.nan, math.inf, -math.inf
    args = (broken, 4, True, 8, 4, "sigmoid", 1.0, bias)
    yield Sample("NaN and infinity", args, open_rows=(1, 3, 4))


def _served(
    sizes: ModelSizes, dtype: torch.dtype, device: torch.device, large: bool = False
) -> Iterator[Sample]:
    import torch

    names = ("experts", "experts_per_token", "expert_groups", "expert_groups_per_token")
    told = [sizes.more.get(name) for name in names]
    if None in told:
        return
    experts, topk, groups, best = (int(size) for size in told if size is not None)
    bias = bias_for_choice(Source(dtype, device, large), experts, 0.1)
    # Routers with a bias give their logits in fp32.
    kinds = {"sigmoid": torch.float32, "softmax": dtype}
    for how in ("sigmoid", "softmax"):
        for tokens in sizes.tokens:
            source = Source(kinds[how], device, large)
            logits = router_logits(source, tokens, experts, spread=4.0 if large else 1.0)
            rest = ("sigmoid", 2.5, bias) if how == "sigmoid" else ("softmax", 1.0, None)
            name = f"{topk} of {tokens} x {experts} in {best} of {groups}, {how}{', large' * large}"
            args = (logits, topk, True, groups, best, *rest)
            if _check(*args) is None:  # a model with sizes that make no groups has other routing
                yield Sample(name, args)


def _bad_inputs(dtype: torch.dtype, device: torch.device) -> Iterator[BadInput]:
    source = Source(dtype, device)
    logits, bias = source.normal(4, 16), source.normal(16)
    sizes = (2, True, 4, 2)
    plain = ("softmax", 1.0, None)
    yield BadInput("not a tensor", ([[1.0, 2.0]], *sizes, *plain), "gating_output")
    yield BadInput("integers", (logits.long(), *sizes, *plain), "gating_output")
    yield BadInput("three dimensions", (source.normal(2, 4, 16), *sizes, *plain), "gating_output")
    none = source.normal(4, 16, 0)
    yield BadInput("three dimensions, the last empty", (none, *sizes, *plain), "gating_output")
    for with_bias, how in (("", plain), (", with a bias", ("sigmoid", 1.0, bias))):
        for name, topk, groups, topk_group, argument in (
            ("no expert", 0, 4, 2, "topk"),
            ("more than the groups have", 9, 4, 2, "topk"),
            ("more than the group has", 8, 4, 1, "topk"),
            ("no group", 2, 0, 2, "num_expert_group"),
            ("groups of other sizes", 2, 3, 2, "num_expert_group"),
            ("none of the groups", 2, 4, 0, "topk_group"),
            ("more than all groups", 2, 4, 5, "topk_group"),
        ):
            args = (logits, topk, True, groups, topk_group, *how)
            yield BadInput(f"{name}{with_bias}", args, argument)
        args = (logits, *sizes, "tanh", *how[1:])
        yield BadInput(f"unknown scores{with_bias}", args, "scoring_func")
    yield BadInput(
        "groups of one, with a bias",
        (logits, 2, True, 16, 2, "sigmoid", 1.0, bias),
        "num_expert_group",
    )
    for name, factor in (("no number", "2"), ("NaN", math.nan)):
        yield BadInput(
            f"factor is {name}", (logits, *sizes, "softmax", factor, None), "routed_scaling_factor"
        )
    for name, other in (
        ("a list", [0.0] * 16),
        ("one number, which would broadcast", bias[:1]),
        ("of two dimensions", bias[None]),
    ):
        yield BadInput(
            f"bias is {name}", (logits, *sizes, "sigmoid", 1.0, other), "e_score_correction_bias"
        )


SPEC = OpSpec(
    oracle=grouped_topk,
    variants=(
        Variant(
            "",
            "(Tensor gating_output, SymInt topk, bool renormalize, SymInt num_expert_group, "
            'SymInt topk_group, str scoring_func="softmax", float routed_scaling_factor=1.0, '
            "Tensor? e_score_correction_bias=None) -> (Tensor, Tensor)",
        ),
    ),
    fake=_fake,
    check=_check,
    samples=_samples,
    served=_served,
    by_token=frozenset({"gating_output"}),
    bad_inputs=_bad_inputs,
    second_form=_by_token,
    tolerances={
        "float32": Tolerance(
            2e-5,
            1e-7,
            "computed in fp32 whatever the logits are; a sigmoid by a fast exp, or by tanh, and "
            "numbers of up to 1e-8 that some kernels add to a sum of scores",
        )
    },
    from_layer=MappingProxyType(
        {
            "topk": lambda layer: layer.topk,
            "renormalize": lambda layer: layer.renormalize,
            "num_expert_group": lambda layer: layer.num_expert_group,
            "topk_group": lambda layer: layer.topk_group,
            "scoring_func": lambda layer: layer.scoring_func,
            "routed_scaling_factor": lambda layer: layer.routed_scaling_factor,
        }
    ),
    dtypes=("float32", "float16", "bfloat16"),
    outputs=(Routing(_scores, margin=MARGIN),),
)
