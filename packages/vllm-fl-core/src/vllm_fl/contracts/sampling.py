"""Random inputs for contracts: the same on every device, and never from the global generator."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["Source", "peak", "positions"]

_POWERS = tuple(2**n for n in range(11, 24))

UNIQUE_ROWS = 257
"""Rows that are made; a larger tensor has them again, in drawn order, so that no two rows a fixed
distance apart are the same and the largest batch of a model costs no time."""


class Source:
    """A private stream of random tensors; two with equal arguments give equal tensors.

    Args:
        dtype: dtype of the tensors, unless a draw names another.
        device: where they are put. Numbers are drawn on the CPU in fp32 and rounded.
        large: whether it is the stream for values as large as activations get, which gives other
            numbers.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, large: bool = False) -> None:
        import torch

        self.dtype = dtype
        self.device = torch.device(device)
        self.large = large
        self._generator = torch.Generator("cpu").manual_seed(20240229 + large)
        self._order = torch.Generator("cpu").manual_seed(20240301)

    def normal(
        self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """A contiguous tensor of normal numbers with standard deviation `scale`."""
        import torch

        rows = min(shape[0], UNIQUE_ROWS)
        block = torch.randn(
            (rows, *shape[1:]), generator=self._generator, dtype=torch.float32, device="cpu"
        )
        block = (block * scale).to(self.device, dtype or self.dtype)
        return block if rows == shape[0] else block[self.rows(shape[0])]

    def rows(self, count: int) -> torch.Tensor:
        """Which of the rows that are made each of `count` rows is: first all, then drawn ones."""
        import torch

        made = torch.arange(min(count, UNIQUE_ROWS), device="cpu")
        shape = (count - len(made),)
        drawn = torch.randint(UNIQUE_ROWS, shape, generator=self._order, device="cpu")
        return torch.cat((made, drawn)).to(self.device)

    def spiked(self, *shape: int, scale: float, peak: float) -> torch.Tensor:
        """Normal numbers of `scale` in which some features are `peak` or -`peak`.

        Large models have such features in a few channels (Sun et al., "Massive Activations in
        Large Language Models", arXiv:2402.17762).
        """
        import torch

        block = self.normal(*shape, scale=scale)
        spikes = block[..., 3::61]
        spikes.copy_(torch.where(spikes > 0, peak, -peak))
        return block


def peak(dtype: torch.dtype) -> float:
    """The largest activation that samples have: beyond fp16's range where `dtype` goes farther."""
    return 3e4 if str(dtype) == "torch.float16" else 1e5


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
