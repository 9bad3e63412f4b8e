"""What the contracts of paged caches share: slots, and what is wrong with the tensors of a call.

A cache is (blocks, block_size, ...). Slot s is its row (s // block_size, s % block_size); a token
whose slot is negative (vLLM's -1, for padding) is not written.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.checks import Problem, floating_tensor, on_device_of, shaped

if TYPE_CHECKING:
    import torch

    from vllm_fl.contracts.sampling import Source

__all__ = [
    "BLOCK_SIZE",
    "bad_slots",
    "blocks_for",
    "check_cache",
    "check_slots",
    "far_slots",
    "served_slots",
    "slots",
    "written",
    "written_one_by_one",
]

BLOCK_SIZE = 16
"""Tokens of a block in samples, which is what vLLM takes on most devices."""


def blocks_for(tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """So many blocks that the tokens of a sample have a slot each, and some slots are left over.

    The same for all small batches, as a model's cache is the same for all batches.
    """
    return max(320 // block_size, 3, tokens // block_size + 2)


def served_slots(tokens: int, blocks: int, block_size: int, device: torch.device) -> torch.Tensor:
    """(tokens,), int64: slots as vLLM gives them: runs within blocks that lie anywhere.

    Every thirteenth token is padding and has the slot -1.
    """
    import torch

    step = next(n for n in range(blocks * 5 // 8 + 1, 2 * blocks + 2) if gcd(n, blocks) == 1)
    place = torch.arange(tokens, dtype=torch.int64, device="cpu")
    block = (place // block_size * step + blocks // 3) % blocks
    found = block * block_size + place % block_size
    found[12::13] = -1
    return found.to(device)


FAR_SLOTS = 2**16
"""Numbers of slots that 16 bits do not hold begin here."""


def far_slots(source: Source, tokens: int, block_size: int) -> tuple[int, torch.Tensor]:
    """(blocks of a cache, slots of tokens on both sides of `FAR_SLOTS`)."""
    import torch

    blocks = FAR_SLOTS // block_size + 4
    last = blocks * block_size - 1
    step = (last - FAR_SLOTS + 40) // (tokens - 1)
    found = torch.arange(tokens, device=source.device) * step + FAR_SLOTS - 40
    return blocks, found.roll(5)


def slots(tokens: int, capacity: int, device: torch.device, *, skipped: int = 0) -> torch.Tensor:
    """(tokens,), int64: slots of their own below `capacity`, scattered over all of it.

    Args:
        tokens: at most `capacity`.
        capacity: how many slots there are.
        device: where they are put.
        skipped: of so many tokens one has the slot -1, beginning with the last of each; 0: none.
    """
    import torch

    step = next(n for n in range(capacity * 5 // 8 + 1, 2 * capacity + 2) if gcd(n, capacity) == 1)
    found = (
        torch.arange(tokens, dtype=torch.int64, device="cpu") * step + capacity // 3
    ) % capacity
    if skipped:
        found[skipped - 1 :: skipped] = -1
    return found.to(device)


def written(cache: torch.Tensor, rows: torch.Tensor, slot_mapping: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of `cache` with these rows in their slots, in its own dtype.

    Nothing is computed: no number would be any more exact in fp64.
    """
    import torch

    whole = cache.clone(memory_format=torch.contiguous_format)
    kept = slot_mapping >= 0
    whole.flatten(0, 1)[slot_mapping[kept]] = rows[kept]
    return whole


def written_one_by_one(
    cache: torch.Tensor, rows: torch.Tensor, slot_mapping: torch.Tensor
) -> torch.Tensor:
    """The same, by block and by token: for `second_form`."""
    import torch

    blocks = [block.clone() for block in cache.unbind(0)]
    for row, slot in zip(rows.unbind(0), slot_mapping.tolist(), strict=True):
        if slot >= 0:
            block, offset = divmod(slot, cache.shape[1])
            blocks[block][offset].copy_(row)
    return torch.stack(blocks)


def check_cache(
    name: str, cache: Any, row: Sequence[int], meaning: str, other_name: str, other: torch.Tensor
) -> Problem:
    """What is wrong with a cache whose rows are of the shape `row`, beside the tensor `other`.

    Args:
        name, cache: the argument.
        row: what follows (blocks, block_size) in its shape.
        meaning: the same in words.
        other_name, other: the argument whose dtype and device it must have.
    """
    problem = floating_tensor(name, cache)
    if problem:
        return problem
    if cache.ndim != 2 + len(row) or tuple(cache.shape[2:]) != tuple(row):
        return name, (
            f"must be (blocks, block_size, {meaning}) with {tuple(row)} at the end, "
            f"got {tuple(cache.shape)}"
        )
    if not cache.shape[1]:
        return name, f"must have a block_size of at least 1, got {tuple(cache.shape)}"
    if cache.dtype != other.dtype:
        return name, f"must have {other_name}'s dtype {other.dtype}, got {cache.dtype}"
    return on_device_of(name, cache, other_name, other)


def check_slots(slot_mapping: Any, cache: torch.Tensor, other_name: str, other: Any) -> Problem:
    """What is wrong with the slots of the tokens of `other`, in `cache`."""
    import torch

    name = "slot_mapping"
    if not isinstance(slot_mapping, torch.Tensor):
        return name, f"must be a torch.Tensor, got {type(slot_mapping).__name__}"
    if slot_mapping.dtype != torch.int64:
        return name, f"must be int64, got {slot_mapping.dtype}"
    problem = shaped(name, slot_mapping, other.shape[:1], "the shape (tokens,) =")
    problem = problem or on_device_of(name, slot_mapping, other_name, other)
    if problem or slot_mapping.is_meta or not slot_mapping.numel():
        return problem
    most, capacity = int(slot_mapping.max()), cache.shape[0] * cache.shape[1]
    if most >= capacity:
        return name, f"must be below blocks * block_size = {capacity}, got {most}"
    return None


def bad_slots(good: torch.Tensor) -> list[tuple[str, object]]:
    """(name, slot_mapping) that no op of a paged cache accepts."""
    return [
        ("slot_mapping is not a tensor", good.tolist()),
        ("slot_mapping of int32", good.int()),
        ("slot_mapping of fewer tokens", good[:-1]),
        ("slot_mapping of two dimensions", good[:, None]),
    ]
