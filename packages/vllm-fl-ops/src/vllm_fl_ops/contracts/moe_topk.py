"""The routing of a mixture of experts: which experts a token takes, and with which weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
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
)

if TYPE_CHECKING:
    import torch

__all__ = ["SPEC"]


def moe_topk(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `topk` experts of each token with the highest scores, and their weights.

    Scores are softmax(gating_output) or sigmoid(gating_output), in fp32. With a bias the experts
    are those of the highest score + bias; their weights are the scores without it.

    Args:
        gating_output: (tokens, experts), the router's logits without unit: float32, float16 or
            bfloat16, of any layout. Nothing is promised for a token with a logit that is not
            finite; it changes nothing for another token.
        topk: how many experts a token takes, from 1 to experts.
        renormalize: whether a token's weights are divided by their sum. Nothing is promised for
            the weights of a token whose chosen scores are all below 1e-6 then: kernels add numbers
            of up to 1e-8 to the sum.
        scoring_func: "softmax" or "sigmoid".
        routed_scaling_factor: a finite number that multiplies the weights last.
        e_score_correction_bias: (experts,), finite, float32, float16 or bfloat16, or None.

    Returns:
        (weights, ids), both (tokens, topk) and contiguous, on gating_output's device: float32, and
        int32 from 0 to experts - 1, no expert twice. The order of a token's experts is free, and
        so is which of equal scores is taken. The inputs are left as they were.

    Raises:
        CallError: an argument is not as said here.

    Source: Shazeer et al., "Outrageously Large Neural Networks" (arXiv:1701.06538); the bias:
    DeepSeek-V3 (arXiv:2412.19437), equation 16; as vLLM's `topk_softmax` and `topk_sigmoid`.
    """
    scores = scored(gating_output, scoring_func)
    ids = highest(_choice(scores, e_score_correction_bias), topk)
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * routed_scaling_factor, ids.int()


def _choice(scores: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return scores if bias is None else scores + bias.double()


def _scores(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    return _choice(scored(gating_output, scoring_func), e_score_correction_bias)


def _by_exponentials(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = gating_output.double()
    if scoring_func == "softmax":
        powers = (wide - wide.amax(-1, keepdim=True)).exp()
        scores = powers / powers.sum(-1, keepdim=True)
    else:
        scores = 0.5 + 0.5 * (wide / 2).tanh()
    ids = by_argmax(_choice(scores, e_score_correction_bias), topk)
    weights = scores.gather(-1, ids) * routed_scaling_factor
    if renormalize:
        weights = weights / scores.gather(-1, ids).sum(-1, keepdim=True)
    return weights, ids.int()


def _fake(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
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
    scoring_func: Any = "softmax",
    routed_scaling_factor: Any = 1.0,
    e_score_correction_bias: Any = None,
) -> Problem:
    return (
        check_logits("gating_output", gating_output)
        or check_topk("topk", topk, gating_output.shape[1])
        or check_scoring(scoring_func)
        or check_factor(routed_scaling_factor)
        or check_bias(e_score_correction_bias, gating_output)
    )


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source = Source(dtype, device)
    yield Sample("1 token", (router_logits(source, 1, 64), 8, True, "softmax", 1.0, None))
    yield Sample("16 tokens", (router_logits(source, 16, 128), 8, True, "softmax", 1.0, None))
    yield Sample("0 tokens", (router_logits(source, 0, 64), 8, True, "softmax", 1.0, None))
    far = router_logits(source, 7, 37, spread=32.0)
    yield Sample("odd sizes, far apart, plain", (far, 3, False, "softmax", 1.5, None))
    every = router_logits(source, 5, 8)
    yield Sample("every expert, plain", (every, 8, False, "softmax", 1.0, None))
    ties = router_logits(source, 6, 16)
    ties[:, 3] = ties[:, 8] = ties[:, 12] = 4.5  # three for the last two places
    ties[:, 5] = 6.0
    yield Sample("ties", (ties, 3, True, "softmax", 1.0, None))
    many = router_logits(source, 3, 384)
    yield Sample("many experts, scaled", (many, 10, True, "softmax", 2.827, None))
    one = router_logits(source, 20, 16)
    yield Sample("one expert, plain", (one, 1, False, "sigmoid", 1.0, None))
    strided = router_logits(source, 8, 80)[::2, 8:72]
    yield Sample("every other row of a slice", (strided, 4, True, "softmax", 1.0, None))
    some = router_logits(source, 9, 64)
    yield Sample("sigmoid", (some, 4, True, "sigmoid", 1.0, None))
    bias = bias_for_choice(source, 64, 0.3)
    yield Sample("sigmoid with bias, scaled", (some.clone(), 6, True, "sigmoid", 2.5, bias))
    bias = bias_for_choice(source, 64, 0.3)
    yield Sample("sigmoid with bias, plain", (some.clone(), 6, False, "sigmoid", 1.5, bias))
    bias = bias_for_choice(source, 64, 0.02)
    yield Sample("softmax with bias, scaled", (some.clone(), 6, True, "softmax", 1.5, bias))
    broken = router_logits(source, 5, 64)
    broken[1, 7], broken[3, 40], broken[4] = math.nan, math.inf, -math.inf
    args = (broken, 6, True, "softmax", 1.0, None)
    yield Sample("NaN and infinity", args, open_rows=(1, 3, 4))
    args = (broken.clone(), 6, True, "sigmoid", 1.0, None)
    yield Sample("NaN and infinity, sigmoid", args, open_rows=(1, 3, 4))


def _served(
    sizes: ModelSizes, dtype: torch.dtype, device: torch.device, large: bool = False
) -> Iterator[Sample]:
    told = [sizes.more.get(name) for name in ("experts", "experts_per_token")]
    if None in told:
        return
    experts, topk = (int(size) for size in told if size is not None)
    import torch

    source, how = Source(dtype, device, large), ", large" * large
    wide = Source(torch.float32, device, large)  # as routers with a bias give them
    for tokens in sizes.tokens:
        logits = router_logits(source, tokens, experts, spread=16.0 if large else 1.0)
        name = f"{topk} of {tokens} x {experts}, "
        yield Sample(f"{name}softmax{how}", (logits, topk, True, "softmax", 1.0, None))
    for tokens in sizes.tokens:
        logits = router_logits(wide, tokens, experts, spread=4.0 if large else 1.0)
        bias = bias_for_choice(source, experts, 0.3)
        name = f"{topk} of {tokens} x {experts}, "
        args = logits, topk, True, "sigmoid", 2.5, bias
        yield Sample(f"{name}sigmoid, fp32 logits{how}", args)


def _bad_inputs(dtype: torch.dtype, device: torch.device) -> Iterator[BadInput]:
    source = Source(dtype, device)
    logits, bias = source.normal(4, 8), source.normal(8)
    plain = (2, True, "softmax", 1.0, None)
    yield BadInput("not a tensor", ([[1.0, 2.0]], *plain), "gating_output")
    yield BadInput("integers", (logits.long(), *plain), "gating_output")
    yield BadInput("three dimensions", (source.normal(2, 4, 8), *plain), "gating_output")
    none = source.normal(4, 8, 0)
    yield BadInput("three dimensions, the last empty", (none, *plain), "gating_output")
    none = source.normal(0, 8, 4)
    yield BadInput("three dimensions, no token", (none, *plain), "gating_output")
    yield BadInput("no expert", (logits, 0, *plain[1:]), "topk")
    yield BadInput("more than there are", (logits, 9, *plain[1:]), "topk")
    yield BadInput("a word", (logits, "2", *plain[1:]), "topk")
    yield BadInput("unknown scores", (logits, 2, True, "tanh", 1.0, None), "scoring_func")
    for name, factor in (("no number", "2"), ("NaN", math.nan), ("infinite", math.inf)):
        yield BadInput(
            f"factor is {name}", (logits, 2, True, "softmax", factor, None), "routed_scaling_factor"
        )
    for name, other in (
        ("a list", [0.0] * 8),
        ("integers", bias.long()),
        ("one number, which would broadcast", bias[:1]),
        ("one too few", bias[:7]),
    ):
        yield BadInput(
            f"bias is {name}", (logits, 2, True, "sigmoid", 1.0, other), "e_score_correction_bias"
        )


SPEC = OpSpec(
    oracle=moe_topk,
    variants=(
        Variant(
            "",
            '(Tensor gating_output, SymInt topk, bool renormalize, str scoring_func="softmax", '
            "float routed_scaling_factor=1.0, Tensor? e_score_correction_bias=None) "
            "-> (Tensor, Tensor)",
        ),
    ),
    fake=_fake,
    check=_check,
    samples=_samples,
    served=_served,
    by_token=frozenset({"gating_output"}),
    bad_inputs=_bad_inputs,
    second_form=_by_exponentials,
    tolerances={
        "float32": Tolerance(
            2e-5,
            1e-7,
            "computed in fp32 whatever the logits are; CUDA's __expf is off by 2 + 1.16 * |x| "
            "units in the last place, and some kernels add 1e-8 to a sum of scores",
        )
    },
    dtypes=("float32", "float16", "bfloat16"),
    outputs=(Routing(_scores, margin=MARGIN),),
)
