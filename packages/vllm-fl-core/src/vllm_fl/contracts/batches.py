"""The positions of a batch of tokens as vLLM makes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["positions"]

_POWERS = tuple(2**n for n in range(11, 24))


def positions(count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Where the tokens of one batch stand in their sequences.

    Prompts stand one behind another, so that positions run, jump back and run again. Between them
    stand sequences that decode: some at one position, some at the ends of what the model was made
    for and at powers of two. Of the prompts, one is the later part of a longer one.

    Args:
        count: tokens of the batch.
        length: the model's length; positions are below it.
        generator: what draws; on the CPU.

    Returns:
        (count,), int64, on the CPU.
    """
    import torch

    def drawn(low: int, high: int) -> int:
        end = max(low + 1, high)
        return int(torch.randint(low, end, (), generator=generator, device="cpu"))

    edges = [length - 1, *(p + d for p in _POWERS for d in (-1, 0) if p + d < length), 0]
    parts: list[torch.Tensor] = []
    missing, number = count, 0
    while missing > 0:
        kind = number % 4
        if kind == 2:  # decoding in step, and at the edges
            at = drawn(0, length)
            part = torch.tensor([at, at, at, *edges[number // 4 :: 2]], device="cpu")
        else:
            longest = min(length, 8 + count // 6)
            run = drawn(min(3, longest), longest + 1)
            begin = drawn(0, length - run + 1) if kind == 1 else 0
            part = torch.arange(begin, begin + run, device="cpu")
        parts.append(part[:missing])
        missing -= len(parts[-1])
        number += 1
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device="cpu")
