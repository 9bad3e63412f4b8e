"""The reference beside the calls of a few steps of a serving engine: drift, with a name.

The plan, its guards and what was compiled of them are those of an engine without it. For a sampled
step the guards are given another function to call, which calls the implementation and compares, as
a demotion gives them one; afterwards they have their own again.

Of a sampled step's calls some are compared, and others of them in the next one: the step takes no
longer for a model that is deeper.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from vllm_fl.contracts import OpSpec
from vllm_fl.engine.plan import Plan
from vllm_fl.logs import get_logger
from vllm_fl.plugins.types import OpImpl
from vllm_fl.text import quote

from .oracle import MEASURED, magnitudes, paired, parts, wanted_here
from .replacing import computes, replacing
from .verification import contract_args

CALLS = 48
"""Calls of a sampled step that are compared, give or take one for each `Key`. A comparison is a
hundred small operations on the device, which the step waits for; Qwen3-8B makes 217 calls."""

ROWS = 256
"""Rows of a call that are compared at most; over the sampled steps every row has its turn."""

LARGEST = 1 << 28
"""Bytes, in fp64, of a call's arguments that are compared at most: vLLM has most of the device."""

TURN = (5**0.5 - 1) / 2
"""The golden ratio's: multiples of it, without their whole part, fall evenly and meet no period."""

MOST = sys.float_info.max
"""Stands for infinity, for which JSON has no number: a wrong id, or NaN."""

SMALLEST = sys.float_info.min
"""Stands for zero as a divisor."""

log = get_logger("engine")

Key = tuple[str, str, int]
"""(op, impl id, the largest number of tokens of the bucket, a power of two)."""


@dataclass(frozen=True)
class Tally:
    """What was seen of one implementation's calls in one bucket of sizes.

    Args:
        seen: how many there were in sampled steps.
        calls: how many of them were compared.
        share: the worst error as a share of the tolerance; 1 is the limit.
        relative: the worst call's norm of the differences over that of the exact result.
        wrong: calls beyond the tolerance.
        nan, inf: elements that are NaN or infinite without right.
    """

    seen: int = 0
    calls: int = 0
    share: float = 0.0
    relative: float = 0.0
    wrong: int = 0
    nan: int = 0
    inf: int = 0

    def plus(self, other: Tally) -> Tally:
        """Both together: of errors the worst, and the sums of what is counted."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Tally(*(max(a, b) if isinstance(a, float) else a + b for a, b in pairs))

    @classmethod
    def of_call(cls, figures: Iterable[Sequence[float]]) -> Tally:
        """One call that was compared: it is wrong once, however many of its outputs are.

        Args:
            figures: what `Wanted.measured` gave for its outputs.
        """
        shares, off, exact, nan, inf = zip(*figures, strict=True)
        squares = max(o / max(e, SMALLEST) for o, e in zip(off, exact, strict=True))
        share, relative = min(max(shares), MOST), math.sqrt(min(squares, MOST))
        return cls(0, 1, share, relative, int(share > 1.0), int(sum(nan)), int(sum(inf)))


class Shadow:
    """Which steps are sampled, and what was seen in them.

    Args:
        plan: what serves.
        rate: the share of steps that is sampled, above 0, at most 1.
        left: op -> why its calls cannot be compared, where its place in vLLM says so.
    """

    def __init__(self, plan: Plan, rate: float, left: Mapping[str, str] | None = None) -> None:
        self.plan, self.rate = plan, rate
        self.steps = 0
        """Steps until now."""
        self.sampled = 0
        """Those that were sampled."""
        self.seen: dict[Key, Tally] = {}
        """What was seen until now."""
        self.new: dict[Key, Tally] = {}
        """What of it `collect` has not taken yet."""
        self.left: dict[str, str] = {}
        """Op -> why its calls are not compared."""
        self.too_large: Counter[str] = Counter()
        """Op -> calls that were too large to be compared when they had their turn."""
        self._turns: Counter[Key] = Counter()
        """Sampled steps in which it was called."""
        self._most = 0
        """Calls of the sampled step that had the most of them."""
        self._every = 1
        """Of a step's calls that have one key, every n-th is compared."""
        self._at: Counter[Key] = Counter()
        """Calls of this step."""
        self._on_device: list[tuple[Key, list[torch.Tensor]]] = []
        """What this step's comparisons gave."""
        for op, entry in plan.entries.items():
            why = (left or {}).get(op) or _left(plan.contracts[op]) if entry.impls else ""
            if why:
                self.left[op] = why

    def takes_step(self) -> bool:
        """Count one step, and whether it is sampled: the same on every rank that counts alike."""
        self.steps += 1
        taken = (self.steps * TURN) % 1.0 < self.rate
        self.sampled += taken
        return taken

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """Inside the block, one step, the plan's bound functions compare what they compute when it
        is their turn: the same calls on every rank that makes the same ones.

        At its end the figures are read, which waits for the device, once.
        """
        self._at.clear()
        self._on_device.clear()
        self._every = max(1, -(-self._most // CALLS))
        with replacing(self.plan.record, self._beside, at_most=1):
            yield
        self._most = max(self._most, self._at.total())
        self._turns.update(self._at.keys())
        for key, calls in self._at.items():
            self._add(key, Tally(seen=calls))
        self._read()

    def collect(self) -> dict[Key, Tally]:
        """What was seen since the last time, by op, implementation and bucket."""
        found, self.new = self.new, {}
        return found

    def _read(self) -> None:
        on_device, self._on_device = self._on_device, []
        if not on_device:
            return
        try:
            rows = iter(torch.stack([row for _, found in on_device for row in found]).tolist())
        except Exception as error:  # as in a comparison: the engine serves on
            for op in {op for (op, _, _), _ in on_device}:
                self._leave(op, error)
            return
        for key, found in on_device:
            self._add(key, Tally.of_call([next(rows) for _ in found]))

    def _add(self, key: Key, tally: Tally) -> None:
        for table in (self.seen, self.new):
            table[key] = table.get(key, Tally()).plus(tally)

    def report(self) -> dict[str, Any]:
        """All of it, JSON-able: `rate`, `steps`, `sampled`, `compared` {op: {impl id: {tokens:
        {seen, calls, share, relative, wrong, nan, inf}}}}, `left` {op: why it is not compared},
        `too_large` {op: calls}."""
        compared: dict[str, dict[str, dict[str, Any]]] = {}
        for (op, impl_id, tokens), tally in sorted(self.seen.items()):
            of_impl = compared.setdefault(op, {}).setdefault(impl_id, {})
            of_impl[str(tokens)] = dataclasses.asdict(tally)
        return {
            "rate": self.rate,
            "steps": self.steps,
            "sampled": self.sampled,
            "compared": compared,
            "left": dict(self.left),
            "too_large": dict(self.too_large),
        }

    def _beside(self, impl: OpImpl) -> Callable[..., Any]:
        """What the guards call in the place of `impl`."""
        op = impl.op_name
        if op in self.left or not computes(self.plan, impl):
            return impl.fn
        spec = self.plan.contracts[op]

        def compared(*args: Any) -> Any:
            call = self._kept(impl, spec, args)
            result = impl.fn(*args)
            if call is not None:
                self._compare(spec, call, result)
            return result

        return compared

    # An engine serves on whatever becomes of a comparison, out of memory included.

    def _kept(self, impl: OpImpl, spec: OpSpec, args: tuple[Any, ...]) -> _Call | None:
        """What is needed to compare a call later, of many rows those whose turn it is; None where
        it is not compared."""
        try:
            whole = contract_args(spec, impl, args)
            tokens = spec.tokens(whole)
            if not tokens:
                return None
            key = spec.name, impl.impl_id, 1 << (tokens - 1).bit_length()
            turn = self._turn(key)
            if turn is None or spec.name in self.left:
                return None
            rows = slice(None)
            if tokens > ROWS and not spec.whole_batch:
                stride = -(-tokens // ROWS)
                rows = slice(turn % stride, None, stride)
            kept = spec.with_changed_rows(whole, lambda arg: arg[rows])
            if sum(8 * arg.numel() for arg in kept if isinstance(arg, torch.Tensor)) <= LARGEST:
                return _Call(key, spec.with_changed_rows(kept, torch.clone), rows)
            self.too_large[spec.name] += 1
        except Exception as error:
            self._leave(spec.name, error)
        return None

    def _turn(self, key: Key) -> int | None:
        """Count a call: the how many-th time its place among the step's calls has its turn, or None
        where it is another's."""
        at = self._turns[key] + self._at[key]
        self._at[key] += 1
        # What a step has beyond that, it has more than any before it.
        too_many = len(self._on_device) >= 2 * CALLS
        return None if at % self._every or too_many else at // self._every

    def _compare(self, spec: OpSpec, call: _Call, result: Any) -> None:
        try:
            measured = call.measured(spec, result)
            if measured:
                self._on_device.append((call.key, measured))
        except Exception as error:
            self._leave(spec.name, error)

    def _leave(self, op: str, error: Exception) -> None:
        self.left[op] = f"the comparison failed: {quote(error)}"
        log.warning("VLLM_FL_SHADOW: op '%s' is no longer compared: %s", op, self.left[op])


@dataclass(frozen=True)
class _Call:
    """What is kept of one call before the implementation may overwrite it.

    Args:
        key: what it counts for.
        args: the contract's, by_token ones as far as they are compared.
        rows: which rows that are.
    """

    key: Key
    args: tuple[Any, ...]
    rows: slice

    def measured(self, spec: OpSpec, result: Any) -> list[torch.Tensor]:
        """As `Wanted.measured`, of all outputs; nothing where there is nothing to compare."""
        rows = tuple(r if r is None or not r.ndim else r[self.rows] for r in parts(result))
        wanted = wanted_here(spec, self.args, magnitudes(spec, self.args))
        return [each for want, mine, _ in paired(rows, wanted) for each in want.measured(mine)]


def _left(spec: OpSpec) -> str:
    """Why calls of an op cannot be compared while it serves, or nothing."""
    if spec.whole_batch and (spec.caches or not spec.ignores_repeats):
        return "its result for a token depends on other tokens or a cache"
    outputs = spec.outputs or ()
    kinds = [type(output).__name__ for output in outputs if not isinstance(output, MEASURED)]
    return f"its {kinds[0]} cannot be compared on the device" if kinds else ""
