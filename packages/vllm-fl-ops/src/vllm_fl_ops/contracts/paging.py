"""Slots of paged caches, and writes into them, for the cache contracts.

A cache is (blocks, block_size, ...). Slot s is its row (s // block_size, s % block_size). A token
with a negative slot (vLLM's -1, for padding) is not written.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

from vllm_fl.contracts.arguments import tensor

if TYPE_CHECKING:
    import torch

    from vllm_fl.contracts.sampling import Source

SLOTS = tensor("tokens", "int64", values="high < blocks * block_size")
"""The argument `slot_mapping` of an op with a cache of (blocks, block_size, ...)."""

SAMPLE_BLOCK_SIZE = 16
"""Tokens of a block in samples: vLLM's value on most devices."""


def blocks_for(tokens: int, block_size: int = SAMPLE_BLOCK_SIZE) -> int:
    """Return enough blocks to give each token of a sample a slot, and leave some slots unused.

    All small batches get the same number, since all batches of a model share a cache.
    """
    return max(320 // block_size, 3, tokens // block_size + 2)


def served_slots(tokens: int, blocks: int, block_size: int, device: torch.device) -> torch.Tensor:
    """(tokens,) slots as vLLM assigns them, int64: consecutive within blocks, which are scattered.

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
"""The first slot number that does not fit into 16 bits."""


def far_slots(source: Source, tokens: int, block_size: int) -> tuple[int, torch.Tensor]:
    """Return (blocks of a cache, (tokens,) slots on both sides of `FAR_SLOTS`)."""
    import torch

    blocks = FAR_SLOTS // block_size + 4
    last = blocks * block_size - 1
    step = (last - FAR_SLOTS + 40) // (tokens - 1)
    found = torch.arange(tokens, device=source.device) * step + FAR_SLOTS - 40
    return blocks, found.roll(5)


def slots(tokens: int, capacity: int, device: torch.device, *, skipped: int = 0) -> torch.Tensor:
    """(tokens,) distinct slots, int64, scattered over a cache.

    Args:
        tokens: at most `capacity`.
        capacity: the number of slots of the cache.
        device: of the result.
        skipped: every `skipped`-th token has the slot -1; 0: no token.
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
    """A contiguous copy of `cache` with `rows` in their slots.

    It has the cache's dtype, because fp64 would not be more exact.
    """
    import torch

    whole = cache.clone(memory_format=torch.contiguous_format)
    kept = slot_mapping >= 0
    whole.flatten(0, 1)[slot_mapping[kept]] = rows[kept]
    return whole


def written_one_by_one(
    cache: torch.Tensor, rows: torch.Tensor, slot_mapping: torch.Tensor
) -> torch.Tensor:
    """Compute `written` token by token, for `second_form`."""
    import torch

    blocks = [block.clone() for block in cache.unbind(0)]
    for row, slot in zip(rows.unbind(0), slot_mapping.tolist(), strict=True):
        if slot >= 0:
            block, offset = divmod(slot, cache.shape[1])
            blocks[block][offset].copy_(row)
    return torch.stack(blocks)
