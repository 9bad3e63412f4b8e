"""The end of a mixture of experts: what a token's experts gave, added up."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.checks import Problem, floating_tensor, on_device_of, shaped
from vllm_fl.contracts.sampling import Source, peak
from vllm_fl.contracts.spec import BadInput, ModelSizes, OpSpec, Sample, Tolerance, Variant

if TYPE_CHECKING:
    import torch

__all__ = ["SPEC"]


def moe_sum(
    input: torch.Tensor,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum over each token's experts, of those that are on this rank.

    Args:
        input: (tokens, topk, hidden), float32, float16 or bfloat16, of any layout: what each of a
            token's experts gave, times its weight. NaN and infinity in a place that counts are
            added as any number is.
        topk_ids: (tokens, topk), int32 or int64, on input's device, of any layout: the experts, or
            a negative
            number for a place without one. What input has in such a place is not added, whatever
            it is; memory that nobody wrote, for example. None: every place counts.
        expert_map: (experts,), int32, on input's device: the number of each expert on this rank,
            or -1 for one that is elsewhere, whose places are not added either. With topk_ids alone.

    Returns:
        (tokens, hidden), contiguous, of input's dtype and on its device; 0 where no place counts.
        The inputs are left as they were.

    Raises:
        CallError: an argument is not as said here. An id beyond expert_map is an error on a CPU; an
            accelerator does not look for it, and it is the device's own error, or undefined.

    Source: Shazeer et al., "Outrageously Large Neural Networks" (arXiv:1701.06538), equation 1;
    the places without an expert: vLLM's `moe_sum`, as of 0.26.
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


def _one_by_one(
    input: torch.Tensor,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    import torch

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


def _fake(
    input: torch.Tensor,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    return input.new_empty((input.shape[0], input.shape[2]))


def _check(input: Any, topk_ids: Any = None, expert_map: Any = None) -> Problem:
    problem = floating_tensor("input", input)
    if problem is None and input.ndim != 3:
        return "input", f"must have the shape (tokens, topk, hidden), got {tuple(input.shape)}"
    return problem or _check_ids(topk_ids, input) or _check_map(expert_map, topk_ids, input)


def _check_ids(topk_ids: Any, input: torch.Tensor) -> Problem:
    import torch

    if topk_ids is None:
        return None
    if not isinstance(topk_ids, torch.Tensor) or topk_ids.dtype not in (torch.int32, torch.int64):
        return "topk_ids", f"must be int32 or int64, got {_kind(topk_ids)}"
    return on_device_of("topk_ids", topk_ids, "input", input) or shaped(
        "topk_ids", topk_ids, input.shape[:2], "the shape (tokens, topk)"
    )


def _check_map(expert_map: Any, topk_ids: Any, input: torch.Tensor) -> Problem:
    import torch

    name = "expert_map"
    if expert_map is None:
        return None
    if not isinstance(expert_map, torch.Tensor) or expert_map.dtype is not torch.int32:
        return name, f"must be int32, got {_kind(expert_map)}"
    if expert_map.ndim != 1:
        return name, f"must have one dimension, got {expert_map.ndim}"
    if topk_ids is None:
        return name, "must come with topk_ids"
    problem = on_device_of(name, expert_map, "input", input)
    if problem or topk_ids.device.type == "meta" or not topk_ids.numel():
        return problem
    highest = int(topk_ids.max())
    if highest >= len(expert_map):
        return "topk_ids", f"must be below expert_map's {len(expert_map)} experts, got {highest}"
    return None


def _kind(value: Any) -> str:
    return str(getattr(value, "dtype", type(value).__name__))


def _ids(source: Source, tokens: int, topk: int, experts: int, dtype: torch.dtype) -> torch.Tensor:
    import torch

    scores = source.normal(tokens, experts, dtype=torch.float32)
    return scores.argsort(-1)[:, :topk].to(dtype)


def _every_third(source: Source, experts: int) -> torch.Tensor:
    """A map of a rank that has the experts 0, 3, 6, ..."""
    import torch

    number = torch.arange(experts, dtype=torch.int32, device=source.device)
    return torch.where(number % 3 == 0, number // 3, -1)


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    import torch

    source = Source(dtype, device)
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
    ids = _ids(source, 9, 4, 16, torch.int32)
    ids[2], ids[4, 1], ids[7, 3] = -1, -1, -1
    unwritten = source.normal(9, 4, 64)
    unwritten[2], unwritten[4, 1], unwritten[7, 3] = math.nan, math.inf, math.nan
    yield Sample("places without an expert", (unwritten, ids, None))
    ids = _ids(source, 9, 4, 16, torch.int64)
    ids[0, 0], ids[5] = -1, -1
    elsewhere = source.normal(9, 4, 64)
    where = _every_third(source, 16)
    elsewhere[_elsewhere(ids, where)] = math.nan
    yield Sample("experts elsewhere", (elsewhere, ids, where))
    ids = _ids(source, 6, 8, 16, torch.int32)[::2, 2:6]
    yield Sample("strided ids", (source.normal(3, 4, 40), ids, _every_third(source, 16)))
    broken = source.normal(5, 4, 64)
    broken[1, 2, 7], broken[3, 0, 40] = math.nan, math.inf
    yield Sample("NaN and infinity", (broken, None, None))


def _served(
    sizes: ModelSizes, dtype: torch.dtype, device: torch.device, large: bool = False
) -> Iterator[Sample]:
    topk = sizes.more.get("experts_per_token")
    if sizes.hidden is None or topk is None:
        return
    source, scale = Source(dtype, device, large), 1.0
    for tokens in sizes.tokens:
        if large:
            scale = peak(dtype) / topk
            input = source.spiked(tokens, int(topk), sizes.hidden, scale=4.0, peak=scale)
        else:
            input = source.normal(tokens, int(topk), sizes.hidden)
        name = f"{tokens} x {int(topk)} x {sizes.hidden}{', large' * large}"
        yield Sample(name, (input, None, None), scale)


def _bad_inputs(dtype: torch.dtype, device: torch.device) -> Iterator[BadInput]:
    source = Source(dtype, device)
    input = source.normal(4, 2, 8)
    ids, here = source.normal(4, 2).int() * 0, source.normal(4).int()
    yield BadInput("not a tensor", ([[[1.0]]], None, None), "input")
    yield BadInput("integers", (input.long(), None, None), "input")
    yield BadInput("two dimensions", (input[0], None, None), "input")
    yield BadInput("four dimensions, no feature", (source.normal(4, 2, 0, 8), None, None), "input")
    yield BadInput("ids are a list", (input, [[0, 0]] * 4, None), "topk_ids")
    yield BadInput("ids are floating", (input, ids.float(), None), "topk_ids")
    yield BadInput("ids of one token, which would broadcast", (input, ids[:1], None), "topk_ids")
    yield BadInput("a map without ids", (input, None, here), "expert_map")
    yield BadInput("a map of int64", (input, ids, here.long()), "expert_map")
    yield BadInput("a map of two dimensions", (input, ids, here.view(2, 2)), "expert_map")
    if source.device.type == "cpu":  # an accelerator would be unusable after it
        yield BadInput("an id beyond the map", (input, ids + 4, here), "topk_ids")


SPEC = OpSpec(
    oracle=moe_sum,
    variants=(
        Variant("", "(Tensor input, Tensor? topk_ids=None, Tensor? expert_map=None) -> Tensor"),
    ),
    fake=_fake,
    check=_check,
    samples=_samples,
    served=_served,
    by_token=frozenset({"input", "topk_ids"}),
    bad_inputs=_bad_inputs,
    second_form=_one_by_one,
    tolerances={
        "float32": Tolerance(1.3e-6, 1e-5, "PyTorch's own fp32 default; sums may cancel"),
        "float16": Tolerance(
            1e-3, 1e-5, "one rounding of 2^-11, and as much again; sums in fp32 may cancel"
        ),
        "bfloat16": Tolerance(
            8e-3, 1e-5, "one rounding of 2^-8, and as much again; sums in fp32 may cancel"
        ),
    },
)
