"""Random inputs for contracts: equal on all devices, and independent of the global generator."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


_POWERS = tuple(2**n for n in range(11, 24))

UNIQUE_ROWS = 257
"""Maximum number of generated rows. A larger tensor repeats them in random order: this is fast, and
rows at any fixed distance differ."""


class Source:
    """A private stream of random tensors. Sources with equal arguments return equal tensors.

    Args:
        dtype: the default dtype of the tensors.
        device: the device of the tensors. Numbers are drawn on the CPU in fp32 and rounded.
        large: whether the values are as large as the largest activations (`peak`). Such a source
            has a different seed.
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
        """Draw a contiguous tensor of normal numbers with standard deviation `scale`."""
        import torch

        rows = min(shape[0], UNIQUE_ROWS)
        block = torch.randn(
            (rows, *shape[1:]), generator=self._generator, dtype=torch.float32, device="cpu"
        )
        block = (block * scale).to(self.device, dtype or self.dtype)
        return block if rows == shape[0] else block[self.rows(shape[0])]

    def rows(self, count: int) -> torch.Tensor:
        """Return (count,), int64: for each row of a tensor, the index of its generated row. The
        first indices are all generated rows in order; the others are random."""
        import torch

        made = torch.arange(min(count, UNIQUE_ROWS), device="cpu")
        shape = (count - len(made),)
        drawn = torch.randint(UNIQUE_ROWS, shape, generator=self._order, device="cpu")
        return torch.cat((made, drawn)).to(self.device)

    def spiked(self, *shape: int, scale: float, peak: float) -> torch.Tensor:
        """Draw normal numbers with standard deviation `scale`, but `peak` or -`peak` in every 61st
        feature. Large models have such features in a few channels (Sun et al., "Massive Activations
        in Large Language Models", arXiv:2402.17762)."""
        import torch

        block = self.normal(*shape, scale=scale)
        spikes = block[..., 3::61]
        spikes.copy_(torch.where(spikes > 0, peak, -peak))
        return block


def peak(dtype: torch.dtype) -> float:
    """Return the largest activation in samples: above fp16's range unless `dtype` is fp16."""
    return 3e4 if str(dtype) == "torch.float16" else 1e5


def positions(count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Draw the positions of a batch's tokens in their sequences: (count,), int64, on the CPU.

    The batch alternates between prompts and decoding sequences. Some prompts begin in the middle of
    their sequence. In each group of decoding sequences, three are at one random position. The
    others are at the first or last position, or near powers of two. Positions are below `length`.
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
        if kind == 2:
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
