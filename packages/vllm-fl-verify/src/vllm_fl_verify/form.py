"""One kind of call of the served model: its batches, and the comparison of their results."""

from __future__ import annotations

import dataclasses
from functools import cached_property, partial
from typing import Any

import torch

from vllm_fl.contracts import OpSpec, QuantisedPair, Sample, Within

from .budget import as_calls
from .expected import Deviation, Expected
from .guarded import Guarded, bits, guarded, handed_over, taken, words
from .oracle import each_part, parts, wanted_of, worst


class Form:
    """One kind of call of the served model, in one layout. It has a pool of rows with ordinary
    values, and a pool with large values."""

    def __init__(self, spec: OpSpec, ordinary: Sample, large: Sample) -> None:
        self.spec = spec
        self.samples = (ordinary, large)
        for sample in self.samples:
            self._put_zeros(sample)
        self.name = ordinary.name.partition(" x ")[2]
        self.static = guarded(self._others(ordinary))
        self._pools: dict[bool, Guarded] = {}
        self._wanted: dict[bool, Expected] = {}

    def _put_zeros(self, sample: Sample) -> None:
        """Set one row of the activations to zero, because a kernel may skip such a row. If results
        are ids, do nothing, because the order of equal numbers is undefined.
        """
        has_ids = not all(isinstance(o, Within | QuantisedPair) for o in self.spec.outputs)
        rows = () if has_ids else self.spec.with_rows(sample.args).values()
        floats = [x for x in rows if x.is_floating_point() and len(x) > 1]
        for x in floats:
            if x.dtype == floats[0].dtype:
                bits(x)[len(x) // 2] = 0

    def _others(self, sample: Sample) -> dict[str, Any]:
        given = self.spec.named(sample.args).items()
        return {n: a for n, a in given if not self.spec.has_rows(n, a)}

    def switch(self, large: bool) -> None:
        """Write the weights and tables for ordinary or large values, in place."""
        for name, value in self._others(self.samples[large]).items():
            if isinstance(value, torch.Tensor):
                self.static.arguments[name].copy_(value)
        self.static.remember()

    def pool(self, large: bool) -> Guarded:
        if large not in self._pools:
            rows = self.spec.with_rows(self.samples[large].args)
            self._pools[large] = guarded(rows, rows.keys())
        return self._pools[large]

    def deviation(self, large: bool, rows: torch.Tensor, got: Any) -> Deviation:
        """Return the error of a batch's results.

        If results have a row per token, or if repeated rows change nothing, the oracle computes
        only the pool, once. If a batch has equal rows, the first is compared with the oracle, and
        others only if their bits differ from it.

        Args:
            large: whether to use the pool of large values.
            rows: the batch's rows of the pool.
        """
        spec = self.spec
        holds_all = spec.ignores_repeats and len(rows.unique()) == self._rows
        if spec.whole_batch and not holds_all:
            return worst(got, self._of(self._batch(large, rows), rows.device))
        if large not in self._wanted:
            self._wanted[large] = self._of(self.samples[large], rows.device)
        if spec.whole_batch and spec.caches:
            return worst(got, self._wanted[large])
        count, found = len(rows), (0.0, "")
        left = torch.arange(count, device=rows.device)
        while len(left) and not found[1]:
            first = torch.full((self._rows,), count, device=rows.device)
            first.scatter_reduce_(0, rows[left], left, "amin")
            held = (first < count).nonzero().squeeze(1)
            exact = self._wanted[large]
            if len(held) < self._rows:
                exact = [want and want.rows(held) for want in exact]
            found = max(found, worst(_of_tokens(got, first[held], count), exact, first[held]))
            left = left[_differing(got, left, first[rows[left]], count)]
        return found

    def calls(self, count: int) -> float:
        """Return the cost of a batch of this many tokens, in calls."""
        of_token = self.pool(False).nbytes / self._rows
        device = next(iter(self.pool(False).storages)).memory.device
        return as_calls(self.static.nbytes + count * of_token, device)

    @cached_property
    def _rows(self) -> int:
        return int(self.spec.tokens(self.samples[0].args))

    def _of(self, sample: Sample, device: torch.device) -> Expected:
        tokens = None
        if not self.spec.whole_batch:
            tokens = next(map(len, self.spec.with_rows(sample.args).values()), None)
        return [want and want.on(device) for want in wanted_of(self.spec, sample, tokens=tokens)]

    def _batch(self, large: bool, rows: torch.Tensor) -> Sample:
        sample = self.samples[large]
        given = self.spec.with_changed_rows(sample.args, partial(taken, rows=rows))
        return dataclasses.replace(sample, args=given, repeats=None)

    def call(self, activations: Guarded) -> Guarded:
        """Return the whole call: activations, weights and tables, in the contract's order."""
        both = {**handed_over(self.static.arguments), **activations.arguments}
        ordered = {name: both[name] for name in self.spec.parameters}
        return Guarded(ordered, (*activations.storages, *self.static.storages))


def _differing(got: Any, tokens: torch.Tensor, others: torch.Tensor, count: int) -> torch.Tensor:
    """Return a mask of tokens with different bits than the equal tokens `others`. Such a difference
    may be correct, because a kernel uses different tiles at an edge.
    """
    found = torch.zeros_like(tokens, dtype=torch.bool)
    for part in parts(got):
        if isinstance(part, torch.Tensor) and _has_rows(part, count):
            mine = (words if part.ndim > 1 else bits)(part.detach())
            some = mine if len(tokens) == count else taken(mine, tokens)
            found |= (some != taken(mine, others)).reshape(len(tokens), -1).any(1)
    return found


def _has_rows(part: torch.Tensor, count: int) -> bool:
    return part.ndim > 0 and len(part) == count and (part.numel() > 1 or count == 1)


def _of_tokens(got: Any, tokens: torch.Tensor, count: int) -> Any:
    return each_part(got, lambda part: taken(part, tokens) if _has_rows(part, count) else part)
