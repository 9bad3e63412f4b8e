"""Sorting of tokens by expert into blocks, for the matrix products of a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.arguments import flag, integer, integers, tensor
from vllm_fl.contracts.outputs import ExpertBlocks
from vllm_fl.contracts.sampling import Source
from vllm_fl.contracts.spec import ModelSizes, Sample

from .common import contract
from .routing import taken_ids

if TYPE_CHECKING:
    import torch


def moe_align_block_size(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows of all experts, sorted by expert; each expert's rows are padded to whole blocks.

    A row is a position in topk_ids: token * topk + k. Experts are in ascending order, and an expert
    without rows has no block.

    Args:
        topk_ids: (tokens, topk), int32 or int64, of any layout: the experts of each token, from 0
            to num_experts - 1. A position with a negative number has no expert, and is omitted.
        block_size: rows of a block, at least 1.
        num_experts: the number of experts on all ranks together, at least 1.
        expert_map: (num_experts,) or longer, int32, on topk_ids' device: the number of each expert
            on this rank, from 0 to num_experts - 1, or -1 for an expert on another rank. None:
            experts keep their numbers.
        pad_sorted_ids: whether to round the length of sorted_token_ids up to whole blocks.
        ignore_invalid_experts: with a map, whether to omit rows of experts on other ranks and to
            sort by the numbers on this rank. If False, the map is applied only to expert_ids, which
            are -1 for blocks of experts on other ranks.

    Returns:
        (sorted_token_ids, expert_ids, num_tokens_post_padded), int32, contiguous, on topk_ids'
        device. sorted_token_ids has the rows of each expert, in any order, padded with numel =
        topk_ids.numel(). Its length suffices for any routing: the smaller of numel * block_size and
        numel + num_experts * (block_size - 1). With pad_sorted_ids, the second number is rounded up
        to whole blocks. expert_ids has the expert of each block of sorted_token_ids, including an
        incomplete last block. num_tokens_post_padded, of shape (1,), is the used length of
        sorted_token_ids. The contents of sorted_token_ids and expert_ids after that length are
        unspecified. The inputs are not modified.

    Raises:
        CallError: an argument violates this contract. An id above num_experts - 1 is an error on a
            CPU. On an accelerator, it causes a device error or undefined results.

    Source: block-sparse products of experts, Gale et al., "MegaBlocks" (arXiv:2211.15841), section
    5.2; the results: vLLM's `moe_align_block_size`, as of 0.26.
    """
    import torch

    rows = topk_ids.numel()
    numbers = topk_ids.flatten().long()
    if expert_map is not None and ignore_invalid_experts:
        numbers = expert_map.long()[numbers.clamp(min=0)].where(numbers >= 0, numbers)
    order = numbers.masked_fill(numbers < 0, num_experts).argsort(stable=True)
    numbers = numbers[order]
    order, numbers = order[numbers >= 0], numbers[numbers >= 0]
    counts = numbers.bincount(minlength=num_experts)
    blocks = (counts + block_size - 1) // block_size
    starts = (blocks.cumsum(0) - blocks) * block_size
    rank = torch.arange(len(numbers), device=numbers.device) - (counts.cumsum(0) - counts)[numbers]

    length = places(rows, block_size, num_experts, pad_sorted_ids)
    sorted_token_ids = numbers.new_full((length,), rows)
    sorted_token_ids[starts[numbers] + rank] = order
    expert_ids = numbers.new_full((-(-length // block_size),), -1)
    of_blocks = torch.arange(num_experts, device=numbers.device).repeat_interleave(blocks)
    if expert_map is not None and not ignore_invalid_experts:
        of_blocks = expert_map.long()[of_blocks]
    expert_ids[: len(of_blocks)] = of_blocks
    used = (blocks.sum() * block_size).reshape(1)
    return sorted_token_ids.int(), expert_ids.int(), used.int()


def places(numel: Any, block_size: int, num_experts: int, pad_sorted_ids: bool) -> Any:
    """The length of `sorted_token_ids`.

    `numel`, the number of elements of topk_ids, may be symbolic.
    """
    import torch

    most = numel + num_experts * (block_size - 1)
    if pad_sorted_ids:
        most = round_up(most, block_size)
    return torch.sym_min(numel * block_size, most)


def round_up(number: Any, block_size: int) -> Any:
    """The smallest multiple of block_size that is at least `number`."""
    return (number + block_size - 1) // block_size * block_size


def _one_by_one(*call: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Append the rows of each expert to a list, and join the lists."""
    import torch

    topk_ids, block_size, num_experts, expert_map, pad_sorted_ids, ignore_invalid_experts = call
    here = list(range(num_experts)) if expert_map is None else [int(n) for n in expert_map]
    filled: dict[int, list[int]] = {expert: [] for expert in range(num_experts)}
    rows = [int(expert) for token in topk_ids.tolist() for expert in token]
    for row, expert in enumerate(rows):
        number = here[expert] if ignore_invalid_experts and expert >= 0 else expert
        if number >= 0:
            filled[number].append(row)
    sorted_rows: list[int] = []
    experts: list[int] = []
    for expert, own in filled.items():
        for first in range(0, len(own), block_size):
            block = own[first : first + block_size]
            sorted_rows += block + [len(rows)] * (block_size - len(block))
            experts.append(expert if ignore_invalid_experts else here[expert])
    used = len(sorted_rows)
    length = len(rows) + num_experts * (block_size - 1)
    length += -length % block_size if pad_sorted_ids else 0
    length = min(length, len(rows) * block_size)
    sorted_rows += [len(rows)] * (length - used)
    experts += [-1] * (-(-length // block_size) - len(experts))
    results = (
        torch.tensor(part, dtype=torch.int32, device=topk_ids.device)
        for part in (sorted_rows, experts, [used])
    )
    return next(results), next(results), next(results)


def _on_this_rank(source: Source, experts: int) -> torch.Tensor:
    """The map of a rank that has every third expert, in descending order."""
    import torch

    number = torch.arange(experts, dtype=torch.int32, device=source.device)
    return torch.where(number % 3 == 0, (experts - 1 - number) // 3, -1).int()


def _samples(source: Source) -> Iterator[Sample]:
    def ids(tokens: int, topk: int, experts: int) -> torch.Tensor:
        return taken_ids(source, tokens, topk, experts).to(source.dtype)

    yield Sample("1 token", (ids(1, 8, 16), 16, 16, None, False, False))
    yield Sample("16 tokens", (ids(16, 4, 24), 16, 24, None, False, False))
    yield Sample("0 tokens", (ids(0, 4, 24), 16, 24, None, False, False))
    yield Sample("odd sizes", (ids(7, 3, 31), 5, 31, None, False, False))
    yield Sample("blocks of 1", (ids(5, 4, 16), 1, 16, None, False, False))
    for size in (32, 64, 128, 256):  # tile sizes in vLLM
        yield Sample(f"blocks of {size}", (ids(300, 2, 5), size, 5, None, False, False))
    yield Sample("one expert", (ids(19, 1, 1), 8, 1, None, False, False))
    yield Sample("many blocks of an expert", (ids(40, 2, 4), 16, 4, None, False, False))
    yield Sample("whole blocks", (ids(9, 2, 8), 16, 8, None, True, False))
    here = _on_this_rank(source, 24)
    yield Sample("experts elsewhere", (ids(33, 4, 24), 8, 24, here, False, False))
    yield Sample("experts elsewhere left out", (ids(33, 4, 24), 8, 24, here, False, True))
    absent = ids(12, 4, 16)
    absent[2], absent[5, 1], absent[11, 3] = -1, -1, -1
    yield Sample("places without an expert", (absent, 4, 16, None, False, False))
    strided = ids(16, 8, 24)[::2, 2:6]
    strided[3, 0], strided[6] = -1, -1
    yield Sample("strided ids", (strided, 8, 24, _on_this_rank(source, 30), True, True))
    absent = ids(5, 4, 16) * 0 - 1
    yield Sample("no place with an expert", (absent, 4, 16, None, False, False))


def _served(
    source: Source, sizes: ModelSizes, experts: int, experts_per_token: int
) -> Iterator[Sample]:
    topk = experts_per_token
    for tokens in sizes.tokens:
        name = f"{tokens} x {topk} of {experts}"
        more = ", large" * source.large
        ids = taken_ids(source, tokens, topk, experts).to(source.dtype)
        yield Sample(f"{name}, blocks of 16{more}", (ids, 16, experts, None, False, False))
        args = (ids.clone(), 128, experts, _on_this_rank(source, experts), False, True)
        yield Sample(f"{name}, blocks of 128, experts elsewhere{more}", args)


def _fake(
    topk_ids: Any, block_size: Any, num_experts: Any, expert_map: Any, pad: Any, *_: Any
) -> Any:
    import torch

    length = places(topk_ids.numel(), block_size, num_experts, pad)
    sizes = (length, (length + block_size - 1) // block_size, 1)
    return tuple(topk_ids.new_empty((size,), dtype=torch.int32) for size in sizes)


def _bad(good: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    ids = good["topk_ids"]
    if ids.device.type == "cpu":  # bad ids make an accelerator unusable
        here = ids.new_zeros(good["num_experts"]).int()
        yield "an id beyond the experts", {"topk_ids": ids + len(here)}
        yield "an id beyond the map", {"topk_ids": ids + len(here), "expert_map": here}


SPEC = contract(
    moe_align_block_size,
    {
        "block_size": integer("value >= 1"),
        "num_experts": integer("value >= 1"),
        "topk_ids": integers("tokens, topk", "high < num_experts"),
        "expert_map": tensor("mapped", "int32", where="mapped >= num_experts").optional(),
        "pad_sorted_ids": flag(),
        "ignore_invalid_experts": flag(),
    },
    _fake,
    bad=_bad,
    group="moe",
    samples=_samples,
    served=_served,
    second_form=_one_by_one,
    dtypes=("int32", "int64"),
    outputs=(
        ExpertBlocks(
            block_size=lambda topk_ids, block_size, *_: block_size,
            padding=lambda topk_ids, *_: topk_ids.numel(),
        ),
    ),
    whole_batch=True,
)
