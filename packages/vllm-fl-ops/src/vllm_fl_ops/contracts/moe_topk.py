"""Routing of a mixture of experts: the experts of each token, and their weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.arguments import flag, integer, scalar, tensor, word
from vllm_fl.contracts.outputs import Routing
from vllm_fl.contracts.sampling import Source
from vllm_fl.contracts.spec import ModelSizes, Sample, Tolerance

from .common import contract, not_finite
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


def moe_topk(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `topk` experts of each token with the highest scores, and their weights.

    Scores are softmax(gating_output) or sigmoid(gating_output), in fp32. With a bias, experts are
    chosen by score + bias; their weights are the scores without the bias.

    Args:
        gating_output: (tokens, experts), the router's logits without unit: float32, float16 or
            bfloat16, of any layout. The result of a token with a logit that is not finite is
            unspecified, and affects no other token.
        topk: the number of experts of a token, from 1 to experts.
        renormalize: whether to divide a token's weights by their sum. If all chosen scores of a
            token are below 1e-6, its weights are then unspecified, because kernels add numbers of
            up to 1e-8 to the sum.
        scoring_func: "softmax" or "sigmoid".
        routed_scaling_factor: a finite factor of the weights, applied last.
        e_score_correction_bias: (experts,), finite, float32, float16 or bfloat16, or None.

    Returns:
        (weights, ids), both (tokens, topk) and contiguous, on gating_output's device. weights is
        float32; ids is int32 from 0 to experts - 1, distinct for each token. A token's experts may
        be in any order. Between equal scores, any choice is correct. The inputs are not modified.

    Raises:
        CallError: an argument violates this contract.

    Source: Shazeer et al., "Outrageously Large Neural Networks" (arXiv:1701.06538); the bias:
    DeepSeek-V3 (arXiv:2412.19437), equation 16; vLLM's `topk_softmax` and `topk_sigmoid`.
    """
    scores = scored(gating_output, scoring_func)
    ids = highest(_choice(scores, e_score_correction_bias), topk)
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * routed_scaling_factor, ids.int()


def _choice(scores: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return scores if bias is None else scores + bias.double()


def _scores(*call: Any) -> torch.Tensor:
    gating_output, _, _, scoring_func, _, bias = call
    return _choice(scored(gating_output, scoring_func), bias)


def _by_exponentials(*call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    gating_output, topk, renormalize, scoring_func, *rest = call
    routed_scaling_factor, e_score_correction_bias = rest
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


def _samples(source: Source) -> Iterator[Sample]:
    yield Sample("1 token", (router_logits(source, 1, 64), 8, True, "softmax", 1.0, None))
    yield Sample("16 tokens", (router_logits(source, 16, 128), 8, True, "softmax", 1.0, None))
    yield Sample("0 tokens", (router_logits(source, 0, 64), 8, True, "softmax", 1.0, None))
    far = router_logits(source, 7, 37, spread=32.0)
    yield Sample("odd sizes, far apart, plain", (far, 3, False, "softmax", 1.5, None))
    every = router_logits(source, 5, 8)
    yield Sample("every expert, plain", (every, 8, False, "softmax", 1.0, None))
    odd = router_logits(source, 5, 7)
    yield Sample("every one of 7 experts", (odd, 7, True, "softmax", 1.0, None))
    ties = router_logits(source, 6, 16)
    ties[:, 3] = ties[:, 8] = ties[:, 12] = 4.5  # three equal scores for two choices
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
    yield Sample("bias below 0", (some.clone(), 6, True, "sigmoid", 1.0, bias - 2.0))
    broken = router_logits(source, 5, 64)
    broken[1, 7], broken[3, 40], broken[4] = math.nan, math.inf, -math.inf
    args = (broken, 6, True, "softmax", 1.0, None)
    yield Sample("NaN and infinity", args, open_rows=(1, 3, 4))
    args = (broken.clone(), 6, True, "sigmoid", 1.0, None)
    yield Sample("NaN and infinity, sigmoid", args, open_rows=(1, 3, 4))


def _served(
    source: Source, sizes: ModelSizes, experts: int, experts_per_token: int
) -> Iterator[Sample]:
    import torch

    topk = experts_per_token
    how = ", large" * source.large
    wide = Source(torch.float32, source.device, source.large)  # for routers with a bias
    for tokens in sizes.tokens:
        logits = router_logits(source, tokens, experts, spread=16.0 if source.large else 1.0)
        name = f"{topk} of {tokens} x {experts}, "
        yield Sample(f"{name}softmax{how}", (logits, topk, True, "softmax", 1.0, None))
    for tokens in sizes.tokens:
        logits = router_logits(wide, tokens, experts, spread=4.0 if source.large else 1.0)
        bias = bias_for_choice(source, experts, 0.3)
        name = f"{topk} of {tokens} x {experts}, "
        args = logits, topk, True, "sigmoid", 2.5, bias
        yield Sample(f"{name}sigmoid, fp32 logits{how}", args)


def _bad(good: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    logits = good["gating_output"]
    yield "three dimensions, the last empty", {"gating_output": logits[..., None][..., :0]}
    yield "three dimensions, no token", {"gating_output": logits[None][:0]}
    yield from not_finite("routed_scaling_factor")


SPEC = contract(
    moe_topk,
    {
        "gating_output": tensor("tokens, experts", where="experts >= 1"),
        "topk": integer("1 <= value <= experts"),
        "renormalize": flag(),
        "scoring_func": word(*SCORING),
        "routed_scaling_factor": scalar(),
        "e_score_correction_bias": tensor("experts").optional(),
    },
    EXPERT_RESULTS,
    bad=_bad,
    group="moe",
    samples=_samples,
    served=_served,
    second_form=_by_exponentials,
    tolerances={
        "float32": Tolerance(
            2e-5,
            1e-7,
            "computed in fp32 for all dtypes of logits; CUDA's __expf has an error of 2 + 1.16 * "
            "|x| ULP, and some kernels add 1e-8 to a sum of scores",
        )
    },
    dtypes=("float32", "float16", "bfloat16"),
    outputs=(Routing(_scores, margin=SCORE_MARGIN),),
)
