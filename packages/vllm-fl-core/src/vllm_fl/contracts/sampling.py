"""Random inputs for contracts: the same on every device, and never from the global generator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .spec import ModelSizes

if TYPE_CHECKING:
    import torch

__all__ = [
    "Source",
    "activation_inputs",
    "bad_activation_inputs",
    "bad_gated_inputs",
    "gated_inputs",
    "peak",
    "served_activation_inputs",
    "served_gated_inputs",
]

UNIQUE_ROWS = 257
"""Rows that are drawn; a larger tensor repeats them. Prime, so that a kernel which takes a wrong
row of a block is still seen, while the largest batch of a model costs no time to draw."""


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
        self._generator = torch.Generator("cpu").manual_seed(20240229 + large)

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
        if rows == shape[0]:
            return block
        return block[torch.arange(shape[0], device=self.device) % rows]

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


def gated_inputs(source: Source) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, x) for an op of the form act(x[..., :d]) * x[..., d:]."""
    yield "1 token", source.normal(1, 2 * 3072)
    yield "16 tokens", source.normal(16, 2 * 3072)
    yield "0 tokens", source.normal(0, 2 * 3072)
    yield "1 feature", source.normal(3, 2)
    yield "odd sizes", source.normal(7, 2 * 37)
    yield "odd sizes beyond one block", source.normal(3, 2 * 1031)
    yield "wide", source.normal(2, 2 * 12288)
    yield "3-D", source.normal(2, 3, 2 * 64)
    yield "4-D", source.normal(2, 3, 2, 2 * 64)
    far = source.normal(5, 2 * 256)
    far[:, :256] *= 300.0  # act(x) is x or 0 here; exp(x) overflows
    yield "gate far from zero", far
    yield "small values", source.normal(4, 2 * 256, scale=1e-2)
    broken = source.normal(5, 2 * 256)
    broken[1, 7], broken[3, 300] = float("nan"), float("inf")
    yield "NaN and infinity", broken
    yield "slice of a wider buffer", source.normal(6, 2 * 96 + 32)[:, 16 : 16 + 2 * 96]
    yield "every other row", source.normal(8, 2 * 64)[::2]


def served_gated_inputs(
    sizes: ModelSizes, dtype: torch.dtype, device: torch.device, large: bool
) -> Iterator[tuple[str, torch.Tensor, float]]:
    """(name, x, scale) of the gated MLP of a served model."""
    if sizes.intermediate is None:
        return
    source, d = Source(dtype, device, large), sizes.intermediate
    for tokens in sizes.tokens:
        x, scale = source.normal(tokens, 2 * d), 1.0
        if large:
            # The products stay below fp16's 65504; in wider dtypes they go beyond it.
            most = 100.0 if str(dtype) == "torch.float16" else 1e3
            scale = 3 * most
            x[:, :d] = source.spiked(tokens, d, scale=4.0, peak=most)
            x[:, d:] = source.spiked(tokens, d, scale=most / 2, peak=scale)
        yield f"{tokens} x 2*{d}{', large' * large}", x, scale


def bad_gated_inputs(source: Source) -> Iterator[tuple[str, object]]:
    """(name, x) that no op of this form accepts."""
    yield from bad_activation_inputs(source)
    yield "no dimension", source.normal(1)[0]
    yield "odd last dimension", source.normal(4, 7)
    yield "three features, which would broadcast", source.normal(4, 3)


def activation_inputs(source: Source, parts: int = 1) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, x) for an activation of every feature, or of `parts` features that lie d apart."""
    yield "1 token", source.normal(1, parts * 512)
    yield "16 tokens", source.normal(16, parts * 512)
    yield "0 tokens", source.normal(0, parts * 512)
    yield "1 feature", source.normal(3, parts)
    yield "odd sizes beyond one block", source.normal(3, parts * 1031)
    yield "3-D", source.normal(2, 3, parts * 64)
    # exp(x) overflows; x * x stays below fp16's 65504.
    yield "far from zero", source.normal(5, parts * 256, scale=40.0)
    yield "small values", source.normal(4, parts * 256, scale=1e-2)
    yield "slice of a wider buffer", source.normal(6, parts * 96 + 32)[:, 16 : 16 + parts * 96]
    yield "every other row", source.normal(8, parts * 64)[::2]


def served_activation_inputs(
    sizes: ModelSizes, dtype: torch.dtype, device: torch.device, large: bool
) -> Iterator[tuple[str, torch.Tensor, float]]:
    """(name, x, scale) of the MLP of a served model that has no gate."""
    if sizes.intermediate is None:
        return
    source = Source(dtype, device, large)
    for tokens in sizes.tokens:
        x = source.normal(tokens, sizes.intermediate)
        if large:  # the squares stay below fp16's 65504
            most = 100.0 if str(dtype) == "torch.float16" else 1e3
            x = source.spiked(tokens, sizes.intermediate, scale=4.0, peak=most)
        yield f"{tokens} x {sizes.intermediate}{', large' * large}", x, 1.0


def bad_activation_inputs(source: Source) -> Iterator[tuple[str, object]]:
    """(name, x) that no activation accepts."""
    import torch

    yield "not a tensor", [1.0, 2.0]
    yield "integers", torch.ones(4, 8, dtype=torch.int64, device=source.device)
