"""The sum of the results of a token's experts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.arguments import integers, tensor
from vllm_fl.contracts.sampling import Source, peak
from vllm_fl.contracts.spec import ModelSizes, Sample, Tolerance

from .common import contract
from .routing import taken_ids

if TYPE_CHECKING:
    import torch


def moe_sum(
    input: torch.Tensor,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum of the results of each token's experts on this rank.

    Args:
        input: (tokens, topk, hidden), float32, float16 or bfloat16, of any layout: the result of
            each of a token's experts, times its weight. NaN and infinity are added like any number.
        topk_ids: (tokens, topk), int32 or int64, on input's device, of any layout: the experts, or
            a negative number for a position without an expert. The input at such a position is not
            added: it may be NaN, or uninitialised memory. None: every position is added.
        expert_map: (experts,), int32, on input's device: the number of each expert on this rank, or
            -1 for an expert on another rank. Results of such an expert are not added. Only with
            topk_ids.

    Returns:
        (tokens, hidden), contiguous, of input's dtype and device; 0 if nothing is added. The inputs
        are not modified.

    Raises:
        CallError: an argument violates this contract. An id beyond expert_map is an error on a CPU.
            On an accelerator, it causes a device error or undefined results.

    Source: Shazeer et al., "Outrageously Large Neural Networks" (arXiv:1701.06538), equation 1; the
    positions without an expert: vLLM's `moe_sum`, as of 0.26.
    """
    wide = input.double()
    if topk_ids is not None:
        wide = wide.masked_fill(_elsewhere(topk_ids, expert_map).unsqueeze(-1), 0.0)
    return wide.sum(1)


def _elsewhere(topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    absent = topk_ids < 0
    if expert_map is None:
        return absent
    return absent | (expert_map[topk_ids.clamp(min=0).long()] < 0)


def _one_by_one(*call: Any) -> torch.Tensor:
    import torch

    input, topk_ids, expert_map = call
    wide = input.double()
    total = torch.zeros_like(wide[:, 0])
    here = None if expert_map is None else {i for i, n in enumerate(expert_map.tolist()) if n >= 0}
    for token, ids in enumerate([] if topk_ids is None else topk_ids.tolist()):
        for place, expert in enumerate(ids):
            if expert >= 0 and (here is None or expert in here):
                total[token] += wide[token, place]
    if topk_ids is None:
        for place in range(wide.shape[1]):
            total += wide[:, place]
    return total


def _every_third(source: Source, experts: int) -> torch.Tensor:
    """The map of a rank that has the experts 0, 3, 6, ..."""
    import torch

    number = torch.arange(experts, dtype=torch.int32, device=source.device)
    return torch.where(number % 3 == 0, number // 3, -1)


def _samples(source: Source) -> Iterator[Sample]:
    import torch

    yield Sample("1 token", (source.normal(1, 8, 512), None, None))
    yield Sample("16 tokens", (source.normal(16, 2, 256), None, None))
    yield Sample("0 tokens", (source.normal(0, 8, 64), None, None))
    yield Sample("odd sizes", (source.normal(7, 3, 37), None, None))
    yield Sample("one expert, more than a block", (source.normal(3, 1, 1031), None, None))
    strided = source.normal(10, 6, 96)[::2, 1:5, 16:80]
    yield Sample("slice of a wider buffer", (strided, None, None))
    turned = source.normal(5, 32, 4).transpose(1, 2)
    yield Sample("hidden features apart", (turned, None, None))
    yield Sample("many experts", (source.normal(5, 10, 64), None, None))
    ids = taken_ids(source, 9, 4, 16).to(torch.int32)
    ids[2], ids[4, 1], ids[7, 3] = -1, -1, -1
    unwritten = source.normal(9, 4, 64)
    unwritten[2], unwritten[4, 1], unwritten[7, 3] = math.nan, math.inf, math.nan
    yield Sample("places without an expert", (unwritten, ids, None))
    ids = taken_ids(source, 9, 4, 16).to(torch.int64)
    ids[0, 0], ids[5] = -1, -1
    elsewhere = source.normal(9, 4, 64)
    where = _every_third(source, 16)
    elsewhere[_elsewhere(ids, where)] = math.nan
    yield Sample("experts elsewhere", (elsewhere, ids, where))
    ids = taken_ids(source, 6, 8, 16).to(torch.int32)[::2, 2:6]
    yield Sample("strided ids", (source.normal(3, 4, 40), ids, _every_third(source, 16)))
    broken = source.normal(5, 4, 64)
    broken[1, 2, 7], broken[3, 0, 40] = math.nan, math.inf
    yield Sample("NaN and infinity", (broken, None, None))


def _served(
    source: Source, sizes: ModelSizes, hidden: int, experts_per_token: int
) -> Iterator[Sample]:
    topk, scale = experts_per_token, 1.0
    for tokens in sizes.tokens:
        if source.large:
            scale = peak(source.dtype) / topk
            input = source.spiked(tokens, topk, hidden, scale=4.0, peak=scale)
        else:
            input = source.normal(tokens, topk, hidden)
        name = f"{tokens} x {topk} x {hidden}{', large' * source.large}"
        yield Sample(name, (input, None, None), scale)


def _bad(good: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    input = good["input"]
    yield "four dimensions, no feature", {"input": input[..., None, :][..., :0]}
    here = input.new_zeros(4).int()
    yield "a map without ids", {"expert_map": here}
    if input.device.type == "cpu":  # bad ids make an accelerator unusable
        beyond = input.new_full(input.shape[:2], 4).int()
        yield "an id beyond the map", {"topk_ids": beyond, "expert_map": here}


SPEC = contract(
    moe_sum,
    {
        "input": tensor("tokens, topk, hidden"),
        "expert_map": tensor("experts", "int32", where="topk_ids is not None").optional(),
        "topk_ids": integers("tokens, topk", "expert_map is None or high < experts").optional(),
    },
    (tensor("tokens, hidden"),),
    bad=_bad,
    group="moe",
    samples=_samples,
    served=_served,
    second_form=_one_by_one,
    tolerances={
        "float32": Tolerance(1.3e-6, 1e-5, "PyTorch's fp32 default; sums may cancel"),
        "float16": Tolerance(1e-3, 1e-5, "one rounding of 2^-11, doubled; sums in fp32 may cancel"),
        "bfloat16": Tolerance(8e-3, 1e-5, "one rounding of 2^-8, doubled; sums in fp32 may cancel"),
    },
)
