"""Generated sequences for attention, with dominant keys at edges, and their results in float64.

Attention on random numbers hides faults: one missing key in a window of 1024 changes a result by
less than its rounding. Each query therefore has a few dominant keys, its needles: at the edges of
its window, at the ends of blocks, and directly outside of its visible keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..expected import Near

NEEDLES = 6
"""Number of needles of a query: an invisible key, its own key, the first visible key, and three
keys at the ends of blocks. More needles would give large logits to all other keys.
"""

FLAT = 0.25
"""Share of queries without needles. Sinks have a noticeable weight only for these queries."""

LEAD, SPREAD, STEEPEST = 3.0, 1.5, 20.0
"""Logits of needles: by how much they exceed the logarithm of the number of keys, by how much two
of them differ, and their maximum under a soft cap. Larger logits would magnify correct roundings.
"""

FINE = 8 * torch.finfo(torch.float32).eps
"""Allowed error of a logit, relative to the lengths of its query and key. All kernels sum the
products of a logit in float32."""


@dataclass(frozen=True)
class Heads:
    """The parameters of an attention layer on one rank.

    Args:
        queries, keys: numbers of heads.
        size, value_size: elements of a key and of a value.
        scale: factor of the logits.
        window: number of keys that a query sees, its own included; None for all keys.
        cap: soft cap of the logits; 0 for none.
        dtype: dtype of queries, keys, values and results.
        stored: dtype of the cache.
        scales: factors of query, key and value in an 8-bit cache.
        quantises: whether the layer converts its queries to the cache's dtype.
        sinks: a logit for each head, or None; they differ between layers.
    """

    queries: int
    keys: int
    size: int
    value_size: int
    scale: float
    window: int | None
    cap: float
    dtype: torch.dtype
    stored: torch.dtype
    scales: tuple[float, ...]
    quantises: bool
    sinks: Tensor | None = field(default=None, compare=False)

    @property
    def is_coarse(self) -> bool:
        return self.stored.itemsize == 1

    def store(self, x: Tensor, scale: float) -> Tensor:
        """Return x in float64, rounded to nearest as a cache must round it."""
        if not self.is_coarse:
            return x.to(self.stored).double()
        top = torch.finfo(self.stored).max
        return (x.float() / scale).clamp(-top, top).to(self.stored).double() * scale

    def draw(
        self, rows: int, width: int, size: float, scale: float, generator: torch.Generator
    ) -> Tensor:
        """Draw normally distributed numbers, of this magnitude if the cache can store them."""
        drawn = torch.randn(rows, self.keys, width, generator=generator, dtype=torch.float64)
        return (drawn * (min(size, 40 * scale) if self.is_coarse else size)).to(self.dtype)


@dataclass(eq=False)
class Made:
    """A sequence of tokens with its keys and values.

    Args:
        heads: the layer.
        blocks: its blocks in the cache, in order.
        ends: number of tokens in the cache after each step, ascending.
        generator: of the random numbers.
        loud: magnitude of the values, which is large in tokens that must have no influence.
        done: number of tokens in the cache.
        until: number of tokens in the cache after the current step.
    """

    heads: Heads
    blocks: Tensor
    ends: Sequence[int]
    generator: torch.Generator
    loud: float = 1.0
    done: int = 0
    until: int = 0
    key: Tensor = field(init=False)
    value: Tensor = field(init=False)

    def __post_init__(self) -> None:
        h, (_, of_key, of_value), length = self.heads, self.heads.scales, self.ends[-1]
        self.key = h.draw(length, h.size, 1.0, of_key, self.generator)
        self.value = h.draw(length, h.value_size, self.loud, of_value, self.generator)
        self.keys, self.values = h.store(self.key, of_key), h.store(self.value, of_value)

    @property
    def part(self) -> slice:
        return slice(self.done, self.until)

    @property
    def size(self) -> int:
        return self.until - self.done

    def next_end(self, most: int) -> int:
        """Return the end of the next step of at most `most` tokens."""
        end = next((end for end in self.ends if end > self.done), self.done)
        return min(end, self.done + most)

    def query(self, positions: Tensor, block: int) -> Tensor:
        """Return queries with needles for tokens; (tokens, heads, size) in the layer's dtype."""
        h, count = self.heads, len(positions)
        shape = count, h.queries
        at = self._needles(positions[:, None].expand(shape), block)
        of_head = torch.arange(h.queries) // (h.queries // h.keys)
        keys = self.keys[at, of_head[None, :, None].expand_as(at)]
        seen = positions + 1 if h.window is None else (positions + 1).clamp(max=h.window)
        base = seen.double().log() + LEAD
        base = base.clamp(min=min(0.4 * h.cap, STEEPEST - SPREAD)) if h.cap else base
        less = SPREAD * torch.rand(*shape, NEEDLES, generator=self.generator, dtype=torch.float64)
        logits = base[:, None, None] + SPREAD - less
        # The shortest query that has these logits with its needles.
        products = keys @ keys.mT + 1e-2 * h.size * torch.eye(NEEDLES)
        made = keys.mT @ torch.linalg.solve(products, logits / h.scale)[..., None]
        flat = torch.randn(*shape, h.size, generator=self.generator, dtype=torch.float64)
        flat *= 1 / (h.scale * math.sqrt(h.size))
        is_flat = torch.rand(*shape, 1, generator=self.generator) < FLAT
        return torch.where(is_flat, flat, made[..., 0]).to(h.dtype)

    def _needles(self, at: Tensor, block: int) -> Tensor:
        """Draw needles for queries at these positions; (tokens, heads, NEEDLES)."""
        h, width = self.heads, NEEDLES - 3
        first = torch.zeros_like(at) if h.window is None else (at - h.window + 1).clamp(min=0)
        outside = (at + 1).clamp(max=len(self.keys) - 1), (first - 1).clamp(min=0)
        # The heads of a query share all blocks that it sees, or as many as they have needles for.
        turns = torch.arange(h.queries * width).view(1, h.queries, width)
        turns = turns + torch.randint(1 << 20, (len(at), 1, 1), generator=self.generator)
        blocks = first // block, at // block - first // block + 1
        starts = (blocks[0][..., None] + turns % blocks[1][..., None]) * block
        ends = starts + block - 1
        edges = torch.where(self._coin(starts), starts, ends)
        edges = edges.clamp(first[..., None], at[..., None])
        unseen = torch.where(self._coin(at), *outside)
        return torch.cat([torch.stack([unseen, at, first], -1), edges], -1)

    def _coin(self, like: Tensor) -> Tensor:
        return torch.rand(like.shape, generator=self.generator) < 0.5

    def wanted(self, query: Tensor, positions: Tensor) -> Near:
        """Return the exact results of these queries of tokens, with their tolerances."""
        h, length = self.heads, int(positions[-1]) + 1
        exact = h.store(query, h.scales[0]) if h.quantises else query.double()
        exact = exact.unflatten(1, (h.keys, -1))
        keys, values = self.keys[:length], self.values[:length]
        logits = torch.einsum("nkgd,lkd->nkgl", exact, keys) * h.scale
        if h.cap:
            logits = h.cap * torch.tanh(logits / h.cap)
        away = positions[:, None] - torch.arange(length)
        hidden = (away < 0) if h.window is None else (away < 0) | (away >= h.window)
        logits.masked_fill_(hidden[:, None, None], -math.inf)
        if h.sinks is not None:
            sink = h.sinks.cpu().double().view(1, h.keys, -1, 1).expand(*logits.shape[:-1], 1)
            logits = torch.cat([logits, sink], -1)
        weights = logits.softmax(-1)[..., :length]
        result = torch.einsum("nkgl,lkd->nkgd", weights, values)
        size = torch.einsum("nkgl,lkd->nkgd", weights, values.abs())
        # One rounding of the result, one rounding of each weight, and the relative error of weights
        # from the absolute error of logits.
        of_logit = FINE * h.scale * exact.norm(dim=-1, keepdim=True) * keys.norm(dim=-1).max()
        of_weight = torch.finfo(h.stored if h.quantises else h.dtype).eps
        allowed = torch.finfo(h.dtype).eps * result.abs() + (of_weight + 2 * of_logit) * size
        return Near(result.flatten(1, 2), allowed.flatten(1, 2), h.dtype)
