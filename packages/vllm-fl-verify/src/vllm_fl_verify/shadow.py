"""Comparison of sampled steps with the reference result while an engine serves (shadow check).

Plan, guards and compiled code do not change. In a sampled step, the guards call a different
function, which calls the implementation and compares its result. Afterwards the guards are
restored.

A sampled step compares only some of its calls, and the next sampled step compares others. The
additional time therefore does not grow with the depth of the model.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from functools import partial
from typing import Any

import torch

from vllm_fl.contracts import OpSpec, Sample
from vllm_fl.engine.plan import Plan
from vllm_fl.logs import get_logger
from vllm_fl.plugins.types import OpImpl
from vllm_fl.text import quote

from .guarded import laid_like
from .oracle import MEASURED_OUTPUTS, magnitudes, paired, parts, wanted_here
from .replacing import computes, replacing
from .verification import contract_args

CALLS = 48
"""Approximate number of compared calls in a sampled step (up to one more per `BucketKey`). A
comparison is about a hundred small operations on the device. Qwen3-8B makes 217 calls per step."""

ROWS = 256
"""Maximum compared rows of a call. Over several sampled steps, all rows are compared."""

LARGEST = 1 << 28
"""Maximum bytes of a compared call's arguments in fp64. vLLM uses most of the device's memory."""

TURN = (5**0.5 - 1) / 2
"""The golden ratio minus 1. The fractional parts of its multiples are evenly distributed, without a
period."""

MOST = sys.float_info.max
"""Replaces infinity (a wrong id, or NaN), which JSON cannot represent."""

SMALLEST = sys.float_info.min
"""Replaces zero as a divisor."""

log = get_logger("engine")

BucketKey = tuple[str, str, int]
"""(op, impl id, the bucket's maximum number of tokens, which is a power of two)."""


@dataclass(frozen=True)
class Tally:
    """Counts and errors of one implementation's calls in one bucket of sizes.

    Args:
        seen: calls in sampled steps.
        calls: compared calls.
        share: maximum error relative to the tolerance. The limit is 1.
        relative: maximum relative error of a call, from norms over all elements.
        wrong: incorrect calls.
        nan, inf: incorrect elements that are NaN or infinite.
    """

    seen: int = 0
    calls: int = 0
    share: float = 0.0
    relative: float = 0.0
    wrong: int = 0
    nan: int = 0
    inf: int = 0

    def plus(self, other: Tally) -> Tally:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Tally(*(max(a, b) if isinstance(a, float) else a + b for a, b in pairs))

    @classmethod
    def of_call(cls, figures: Iterable[Sequence[float]]) -> Tally:
        """Return the tally of one compared call, from `Wanted.measured` of its outputs. The call is
        counted as incorrect once, for any number of incorrect outputs."""
        shares, differing, exact, nan, inf = zip(*figures, strict=True)
        squares = max(o / max(e, SMALLEST) for o, e in zip(differing, exact, strict=True))
        share, relative = min(max(shares), MOST), math.sqrt(min(squares, MOST))
        return cls(0, 1, share, relative, int(share > 1.0), int(sum(nan)), int(sum(inf)))


class Shadow:
    """Samples steps and compares their calls.

    Args:
        rate: share of sampled steps, greater than 0 and at most 1.
        left: op -> why its calls cannot be compared at its targets in vLLM.
    """

    def __init__(self, plan: Plan, rate: float, left: Mapping[str, str] | None = None) -> None:
        self.plan, self.rate = plan, rate
        self.steps = 0
        self.sampled = 0
        self.seen: dict[BucketKey, Tally] = {}
        """Tallies of all sampled steps."""
        self.new: dict[BucketKey, Tally] = {}
        """Tallies since the last `collect`."""
        self.left: dict[str, str] = {}
        """Op -> why its calls are not compared."""
        self.too_large: Counter[str] = Counter()
        """Op -> number of calls that were due but too large to compare."""
        self._turns: Counter[BucketKey] = Counter()
        """Key -> number of sampled steps with its calls."""
        self._most = 0
        """Maximum number of calls in a sampled step."""
        self._every = 1
        """Distance between compared calls of a key, in calls."""
        self._at: Counter[BucketKey] = Counter()
        """Key -> number of its calls in this step."""
        self.kept: dict[tuple[str, str], str] = {}
        """(op, impl id) -> where its first incorrect call was kept, for messages."""
        self._on_device: list[tuple[BucketKey, list[torch.Tensor]]] = []
        """Errors of this step's compared calls."""
        for op, entry in plan.entries.items():
            why = (left or {}).get(op) or _left(plan.contracts[op]) if entry.impls else ""
            if why:
                self.left[op] = why

    def takes_step(self) -> bool:
        """Count one step, and return whether to sample it. Ranks with equal counts sample the same
        steps."""
        self.steps += 1
        taken = (self.steps * TURN) % 1.0 < self.rate
        self.sampled += taken
        return taken

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """Compare due calls of the plan's implementations inside the block, which runs one step.
        Ranks that make the same calls compare the same calls. At the end the errors are read, with
        one synchronisation of the device."""
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

    def collect(self) -> dict[BucketKey, Tally]:
        found, self.new = self.new, {}
        return found

    def _read(self) -> None:
        on_device, self._on_device = self._on_device, []
        if not on_device:
            return
        try:
            rows = iter(torch.stack([row for _, found in on_device for row in found]).tolist())
        except Exception as error:  # the engine continues to serve
            for op in {op for (op, _, _), _ in on_device}:
                self._leave(op, error)
            return
        for key, found in on_device:
            self._add(key, Tally.of_call([next(rows) for _ in found]))

    def _add(self, key: BucketKey, tally: Tally) -> None:
        for table in (self.seen, self.new):
            table[key] = table.get(key, Tally()).plus(tally)

    def report(self) -> dict[str, Any]:
        """Return all results as JSON-able values. Keys: `rate`, `steps`, `sampled`, `compared` {op:
        {impl id: {tokens: {seen, calls, share, relative, wrong, nan, inf}}}}, `left` {op: why it is
        not compared}, `too_large` {op: calls}."""
        compared: dict[str, dict[str, dict[str, Any]]] = {}
        for (op, impl_id, tokens), tally in sorted(self.seen.items()):
            of_impl = compared.setdefault(op, {}).setdefault(impl_id, {})
            of_impl[str(tokens)] = asdict(tally)
        return {
            "rate": self.rate,
            "steps": self.steps,
            "sampled": self.sampled,
            "compared": compared,
            "left": dict(self.left),
            "too_large": dict(self.too_large),
        }

    def _beside(self, impl: OpImpl) -> Callable[..., Any]:
        op = impl.op_name
        if op in self.left or not computes(self.plan, impl):
            return impl.fn
        spec = self.plan.contracts[op]

        def compared(*args: Any) -> Any:
            call = self._kept(impl, spec, args)
            result = impl.fn(*args)
            if call is not None:
                self._compare(spec, impl, call, result)
            return result

        return compared

    # Errors of comparisons, including lack of memory, must not stop the engine.

    def _kept(self, impl: OpImpl, spec: OpSpec, args: tuple[Any, ...]) -> _Call | None:
        """Copy the due rows of a call, to compare it later. Returns None if the call is not
        compared."""
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
                return _Call(key, spec.with_changed_rows(kept, torch.clone), rows, whole)
            self.too_large[spec.name] += 1
        except Exception as error:
            self._leave(spec.name, error)
        return None

    def _turn(self, key: BucketKey) -> int | None:
        """Count a call.

        Return None if it is not due, otherwise the number of due calls before it.
        """
        at = self._turns[key] + self._at[key]
        self._at[key] += 1
        # If a step has more calls than any previous one, its excess calls are skipped.
        too_many = len(self._on_device) >= 2 * CALLS
        return None if at % self._every or too_many else at // self._every

    def _compare(self, spec: OpSpec, impl: OpImpl, call: _Call, result: Any) -> None:
        try:
            measured = call.measured(spec, result)
            if measured:
                self._on_device.append((call.key, measured))
                self._keep(spec, impl, call, measured)
        except Exception as error:
            self._leave(spec.name, error)

    def _keep(self, spec: OpSpec, impl: OpImpl, call: _Call, measured: list[torch.Tensor]) -> None:
        """Keep the call if it is incorrect, which needs a synchronisation."""
        keeper = self.plan.record.keeper
        if keeper is None or not keeper.wants(*call.key[:2]):
            return
        share = max(float(each[0]) for each in measured)
        if share > 1.0:
            why = f"it is incorrect: {share:.3g}x tolerance (in a shadow check)"
            self.kept[call.key[:2]] = keeper.keep(spec, impl, why, partial(call.made, spec, impl))

    def _leave(self, op: str, error: Exception) -> None:
        self.left[op] = f"the comparison failed: {quote(error)}"
        log.warning("VLLM_FL_SHADOW: op '%s' is no longer compared: %s", op, self.left[op])


@dataclass(frozen=True)
class _Call:
    """The arguments of a call, before the implementation overwrites some of them.

    Args:
        key: the key of its tally.
        args: the contract's arguments, with only the compared rows.
        rows: the compared rows.
        whole: the arguments themselves, which the implementation may have overwritten.
    """

    key: BucketKey
    args: tuple[Any, ...]
    rows: slice
    whole: tuple[Any, ...]

    def made(self, spec: OpSpec, impl: OpImpl) -> Sample:
        """Return the whole call; only the compared rows if it overwrote its arguments."""
        args = self.whole
        if spec.consumed(impl.consumes, args):
            pairs = zip(self.args, args, strict=True)
            args = tuple(mine if mine is own else laid_like(mine, own) for mine, own in pairs)
        return Sample("in a shadow check", args, math.nan)

    def measured(self, spec: OpSpec, result: Any) -> list[torch.Tensor]:
        rows = tuple(r if r is None or not r.ndim else r[self.rows] for r in parts(result))
        wanted = wanted_here(spec, self.args, magnitudes(spec, self.args))
        return [each for want, mine, _ in paired(rows, wanted) for each in want.measured(mine)]


def _left(spec: OpSpec) -> str:
    if spec.whole_batch and (spec.caches or not spec.ignores_repeats):
        return "its result for a token depends on other tokens or a cache"
    others = [each for each in spec.outputs or () if not isinstance(each, MEASURED_OUTPUTS)]
    return f"its {type(others[0]).__name__} cannot be compared on the device" if others else ""
