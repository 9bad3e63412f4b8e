"""Merging attention over a prefix of the keys with attention over the remaining keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.arguments import like, tensor
from vllm_fl.contracts.outputs import Within
from vllm_fl.contracts.sampling import Source
from vllm_fl.contracts.spec import ModelSizes, Sample, Tolerance

from .common import contract

if TYPE_CHECKING:
    import torch


def merge_attn_states(
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over all keys, merged from the attention over a prefix and over the suffix.

    With the weights p = exp(prefix_lse) and s = exp(suffix_lse) of each token and head, the output
    is (p * prefix_output + s * suffix_output) / (p + s), and its log-sum-exp is log(p + s). A
    log-sum-exp of -inf, or of +inf as in FlashAttention 2, means that a side has no keys. The other
    side is then the result. The output of the side without keys is ignored, and may be
    uninitialised memory.

    Args:
        prefix_output: (tokens, heads, head_size), float32, float16 or bfloat16, of any layout: a
            head may be the first columns of a wider head.
        prefix_lse: (tokens, heads), float32, on prefix_output's device, of any layout: natural
            logarithms, not NaN. vLLM stores heads first, and passes the transposed view.
        suffix_output: of prefix_output's shape, dtype and device, of any layout.
        suffix_lse: like prefix_lse.

    Returns:
        (output, lse), contiguous. output has prefix_output's shape, dtype and device; lse is
        (tokens, heads), float32. If both sides have no keys, lse is -inf. output is then 0 if both
        outputs are 0, and otherwise either 0 or prefix_output.

    Raises:
        CallError: an argument violates this contract.

    Source: Ye et al., "FlashInfer" (arXiv:2501.01005), section 2.2; no keys: vLLM's
    `merge_attn_states`.
    """
    import torch

    prefix, suffix = _without_infinity(prefix_lse), _without_infinity(suffix_lse)
    most = torch.maximum(prefix, suffix).nan_to_num(neginf=0.0)
    p, s = (prefix - most).exp(), (suffix - most).exp()
    total = p + s
    weighted = _share(p, prefix_output, prefix) + _share(s, suffix_output, suffix)
    output = weighted / total.masked_fill(total == 0, 1.0)[..., None]
    return output, total.log() + most


def _share(weight: torch.Tensor, output: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    product = weight[..., None] * output.double()
    return product.masked_fill(lse.isneginf()[..., None], 0.0)


def _without_infinity(lse: torch.Tensor) -> torch.Tensor:
    wide = lse.double()
    return wide.masked_fill(wide == math.inf, -math.inf)


def _by_sigmoid(*call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    prefix_output, prefix_lse, suffix_output, suffix_lse = call
    prefix, suffix = (
        torch.where(lse.isinf(), -math.inf, lse.double()) for lse in (prefix_lse, suffix_lse)
    )
    lse = torch.logaddexp(prefix, suffix)
    nothing = lse.isneginf()
    share = torch.sigmoid((prefix - suffix).masked_fill(nothing, 0.0))[..., None]
    output = torch.lerp(suffix_output.double(), prefix_output.double(), share)
    output = torch.where(prefix.isneginf()[..., None], suffix_output.double(), output)
    output = torch.where(suffix.isneginf()[..., None], prefix_output.double(), output)
    return output.masked_fill(nothing[..., None], 0.0), lse


def _samples(source: Source) -> Iterator[Sample]:
    import torch

    def lse(tokens: int, heads: int, scale: float = 2.0) -> torch.Tensor:
        """Log-sum-exps with heads first in memory, as in vLLM."""
        return source.normal(heads, tokens, scale=scale, dtype=torch.float32).T

    def call(tokens: int, heads: int, width: int, scale: float = 2.0) -> list[torch.Tensor]:
        return [
            part
            for _ in range(2)
            for part in (source.normal(tokens, heads, width), lse(tokens, heads, scale))
        ]

    yield Sample("1 token", tuple(call(1, 4, 64)))
    yield Sample("16 tokens", tuple(call(16, 4, 128)))
    yield Sample("0 tokens", tuple(call(0, 4, 64)))
    yield Sample("odd sizes", tuple(call(7, 3, 33)))
    yield Sample("sums beyond the range of exp", tuple(call(9, 2, 64, scale=300.0)))

    first, first_lse, second, second_lse = call(9, 4, 64)
    by_token = first_lse.contiguous(), second_lse.contiguous()
    yield Sample("log-sum-exps by token", (first, by_token[0], second, by_token[1]))
    wide = [source.normal(6, 4, 96)[..., :64] for _ in range(2)]
    yield Sample("padded heads", (wide[0], lse(6, 4), wide[1], lse(6, 4)))
    mixed = source.normal(6, 4, 96)[..., :64], source.normal(12, 4, 64)[::2]
    yield Sample("two layouts", (mixed[0], lse(6, 4), mixed[1], lse(6, 4)))

    for name, infinity in (("-inf", -math.inf), ("+inf", math.inf)):
        first, first_lse, second, second_lse = call(8, 4, 64)
        first_lse[::3], second_lse[1::3, 2] = infinity, infinity
        yield Sample(f"no keys on one side, {name}", (first, first_lse, second, second_lse))
    first, first_lse, second, second_lse = call(8, 4, 64)
    for output, sums in ((first, first_lse), (second, second_lse)):
        output[::2, 1], sums[::2, 1] = 0.0, -math.inf
    first_lse[4, 1] = math.inf
    yield Sample("NaN nowhere: no keys on either side", (first, first_lse, second, second_lse))
    first, first_lse, second, second_lse = call(8, 4, 64)
    first[1, 2, 7], second[3, 0, 40] = math.nan, math.nan
    yield Sample("NaN in two heads", (first, first_lse, second, second_lse))
    for name, infinity in (("-inf", -math.inf), ("+inf", math.inf)):
        first, first_lse, second, second_lse = call(8, 4, 64)
        first[::3], first_lse[::3] = math.nan, infinity
        second[1::3, 2], second_lse[1::3, 2] = math.inf, infinity
        args = first, first_lse, second, second_lse
        yield Sample(f"unwritten where there are no keys, {name}", args, kit_only=True)


def _served(source: Source, sizes: ModelSizes, heads: int) -> Iterator[Sample]:
    import torch

    width = int(sizes.more.get("v_head_dim") or 0) or sizes.head_size  # of latent attention, if any
    if width is None:
        return
    scale = 30.0 if source.large else 1.0
    for tokens in sizes.tokens:
        args = [
            part
            for _ in range(2)
            for part in (
                source.normal(tokens, heads, width, scale=scale),
                source.normal(tokens, heads, scale=4.0 * scale, dtype=torch.float32),
            )
        ]
        args[1][3::17] = -math.inf  # a request without a prefix
        name = f"{tokens} x {heads} heads of {width}{', large' * source.large}"
        yield Sample(name, tuple(args), scale)


def _bad(good: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    both = ("prefix_output", "suffix_output")
    yield "both outputs of integers", {name: good[name].long() for name in both}
    for name in ("prefix_lse", "suffix_lse"):
        yield f"{name} of float64", {name: good[name].double()}
        yield f"{name} of heads, then tokens", {name: good[name].T}


SPEC = contract(
    merge_attn_states,
    {
        "prefix_output": tensor("tokens, heads, head_size"),
        "prefix_lse": tensor("tokens, heads", "float32"),
        "suffix_output": like("prefix_output"),
        "suffix_lse": tensor("tokens, heads", "float32"),
    },
    (like("prefix_output"), like("prefix_lse")),
    bad=_bad,
    samples=_samples,
    served=_served,
    second_form=_by_sigmoid,
    tolerances={
        "float32": Tolerance(
            1.3e-6, 1e-5, "PyTorch's fp32 default, also vLLM's; room for a fast exp"
        ),
        "float16": Tolerance(1e-3, 1e-5, "1 rounding of 2^-11, doubled"),
        "bfloat16": Tolerance(8e-3, 1e-5, "1 rounding of 2^-8, doubled"),
    },
    outputs=(
        Within(),
        Within(
            {
                "float32": Tolerance(
                    1.3e-6, 1e-5, "PyTorch's fp32 default; room for a fast exp and log"
                )
            }
        ),
    ),
)
