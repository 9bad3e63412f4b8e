"""What a table is worth in a whole model, by the times of its ops alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..engine.tuned import TunedOp

__all__ = ["estimates"]

AT = (1, 8, 64)
"""Tokens of a step that people ask about first; the largest that was measured comes last."""

HOW = (
    "An estimate: products and cache writes as they were measured here, once a layer, and the "
    "vocabulary's product as fast as these. It leaves out attention, and what the compiler fuses."
)


def estimates(counted: Sequence[TunedOp], layers: int, head: float) -> Iterator[str]:
    """Say what part of a step the rows of these ops save, at some numbers of tokens.

    Args:
        counted: ops of which each layer has every form once; the first is the products.
        layers: how many the model has.
        head: the bytes of the vocabulary's product, by those of a layer's products.
    """
    products = counted[0]
    measured = {figure.tokens for figure in products.figures}
    largest = max(measured, default=0)
    is_told = False
    for tokens in (*(n for n in AT if n < largest), largest):
        times = [_times(op, tokens) for op in counted]
        # It computes a row for each sequence, so its weights are what it takes the time for.
        step = layers * sum(default for default, _ in times) + head * _times(products, 1)[0]
        if tokens in measured and step:
            saved = layers * sum(default - chosen for default, chosen in times) / step
            of = f"{tokens} tokens" if tokens == largest else f"a decoding step at batch {tokens}"
            yield f"It saves about {100 * saved:.1f} % of {of}."
            is_told = True
    if is_told:
        yield HOW


def _times(op: TunedOp, tokens: int) -> tuple[float, float]:
    """What the default and the chosen one take, µs; zeros where one of them is not known."""
    figures = {figure.impl: figure.us for figure in op.figures if figure.tokens == tokens}
    default, took = figures.get(op.default), figures.get(op.chosen(tokens))
    return (default, took) if default and took else (0.0, 0.0)
