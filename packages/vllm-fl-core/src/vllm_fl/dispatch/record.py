"""Counters of calls, refusals, failures and fallbacks of a manager or of a plan."""

from __future__ import annotations

import functools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from ..logs import SAID_AT_MOST
from ..plugins.inspection import Key
from ..plugins.types import OpImpl
from ..text import quote
from .resolver import describe_impl


class Skipped(Exception):
    """Raised by a guard if its first candidate is demoted."""


BY_GUARD = "in a run of the model"
"""Name of a call that a guard made; its arguments may be overwritten."""


class Record:
    """Counts calls, stores demotions, and logs each event once.

    Example: A is the first candidate of an op and does not support one of two calls. B computes
    that call. Then `refusals` is {A: 1} and `fallbacks` is {B: 1}. If calls are counted, `_asked`
    is {A: 2}, `_moved` is {A: -1, B: 1}, and `calls`, their sum, is {A: 1, B: 1}.

    Args:
        decide: (op, impl id, why) -> whether to demote an implementation that failed; calls
            `demote` if so. If it is None, failures are raised, for example under a sealed plan.
    """

    def __init__(
        self, log: logging.Logger, decide: Callable[[str, str, str], bool] | None = None
    ) -> None:
        self._log, self._decide = log, decide
        self.counts: Literal["", "calls", "tracings"] = ""
        """Whether to count calls or tracings. Calls of traced code cannot be counted, and opaque
        operators are never traced."""
        self.fallbacks: Counter[Key] = Counter()
        """Calls that an implementation computed as a fallback."""
        self.refusals: Counter[Key] = Counter()
        """Calls that an implementation did not support."""
        self.failures: dict[Key, str] = {}
        self._asked: Counter[Key] = Counter()
        """Calls for which an implementation was the first candidate. It is empty unless calls are
        counted."""
        self._moved: Counter[Key] = Counter()
        """Calls that fell back to an implementation, minus the calls that it passed on."""
        self.demotions: dict[Key, str] = {}
        self.guards: weakref.WeakSet[Any] = weakref.WeakSet()
        """All compiled `Guard` objects with this record. A demotion does not switch bare guards."""
        self.keeper: Any = None
        """The `vllm_fl_tools.operate.faults.Faults` that keeps faulty calls (VLLM_FL_KEEP_FAULTS),
        or None."""
        self._announced: dict[str, str] = {}
        self._said: set[tuple[str, ...]] = set()
        self.is_aside = False

    @property
    def calls(self) -> Counter[Key]:
        """Calls by the implementation that computed them. It is empty unless calls are counted."""
        asked = Counter(self._asked)  # a copy, because other threads count
        counted = {op for op, _ in asked}
        moved = {key: count for key, count in list(self._moved.items()) if key[0] in counted}
        return asked + Counter(moved)

    def passed_over(self) -> dict[Key, str]:
        """Return (op, impl id) -> a reason, for implementations that refused calls and passed on
        more calls than they computed as a fallback."""
        reasons = {what[1:3]: what[3] for what in sorted(self._said) if what[0] == "refused"}
        return {
            key: reasons.get(key, "the log has the reasons")
            for key, count in self._moved.items()
            if count < 0 and self.refusals[key]
        }

    def begin(self, *, keeps_calls: bool = False) -> None:
        """Reset the counters, but not `calls` if `keeps_calls`. Fallbacks from the time when the
        model was built are kept."""
        calls = self.calls if keeps_calls else Counter[Key]()
        for key in set(self._moved) & set(self.fallbacks):
            del self.fallbacks[key]
        for table in (self._asked, self._moved, self.refusals):
            table.clear()
        self._asked.update(calls)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Do not count the calls inside the block. Inside it `is_aside` is true, for other
        threads."""
        kept = self.fallbacks, self.refusals, self._asked, self._moved
        self.fallbacks, self.refusals, self._asked, self._moved = map(Counter, kept)
        self.is_aside = True
        try:
            yield
        finally:
            self.fallbacks, self.refusals, self._asked, self._moved = kept
            self.is_aside = False

    def demote(self, op: str, impl_id: str, why: str) -> None:
        self.demotions[op, impl_id] = why
        self._switch(op)

    def end_demotions(self, op: str | None = None) -> None:
        for name, impl_id in list(self.demotions):
            if op in (None, name):
                del self.demotions[name, impl_id]
                self._switch(name)

    def clear(self) -> None:
        """Reset counters, demotions and logged lines, for example in a forked process."""
        self.end_demotions()
        counted = self.fallbacks, self.refusals, self._asked, self._moved
        for table in (*counted, self.failures, self._announced, self._said):
            table.clear()

    def watch(self, guard: Any) -> None:
        """Switch `guard` to its first candidate, and again at each demotion of the op."""
        self.guards.add(guard)
        guard.switch()

    def _switch(self, op: str) -> None:
        for guard in list(self.guards):
            if guard.chain.op == op:
                guard.switch()

    def skipped_first(self, op: str, first: OpImpl) -> None:
        self._moved[op, first.impl_id] -= 1

    def refused(self, op: str, impl: OpImpl, reason: str) -> None:
        self.refusals[op, impl.impl_id] += 1
        if self._once("refused", op, impl.impl_id, reason):
            text = "Implementation '%s' does not support a call of op '%s': %s"
            self._log.info(text, impl.impl_id, op, reason)

    def failed(self, op: str, impl: OpImpl, error: Exception, *, last: bool) -> bool:
        """Record that `impl` raised an error; `last` is true for the last candidate. Return whether
        it was demoted. If not, the caller must raise the error."""
        self.failures[op, impl.impl_id] = quote(error)
        why = f"failed earlier: {quote(error)}"
        demoted = self._decide is not None and self._decide(op, impl.impl_id, why)
        who = "Last implementation" if demoted and last else "Implementation"
        level = logging.WARNING if demoted and not last else logging.ERROR
        self._log.log(level, f"{who} '%s' failed for op '%s': %s", impl.impl_id, op, error)
        return demoted

    def fell_back(self, op: str, first: OpImpl, impl: OpImpl) -> None:
        """Record that `impl` computed a call as a fallback."""
        self.fallbacks[op, impl.impl_id] += 1
        self._moved[op, impl.impl_id] += 1
        if self._once("fallback", op, first.impl_id, impl.impl_id):
            self._log.info("Op '%s' fallback to %s", op, describe_impl(impl))
        if (op, first.impl_id) in self.demotions:
            self._announced[op] = impl.impl_id

    def unfounded(self, op: str, impl: OpImpl) -> None:
        """Log that `impl` also runs at sizes assigned to `stock`, because the target has no
        callable vLLM implementation (`native`)."""
        if self._once("unfounded", op, impl.impl_id):
            self._log.warning(
                "Op '%s' uses vLLM's code at some sizes, but one target has no callable vLLM "
                "implementation (`native`); '%s' runs there instead",
                op,
                impl.impl_id,
            )

    def announce(self, op: str, impl: OpImpl) -> None:
        before = self._announced.get(op)
        if before is None:
            self._log.info("Op '%s' using %s", op, describe_impl(impl))
        elif before != impl.impl_id:
            self._log.info("Op '%s' switched from '%s' to %s", op, before, describe_impl(impl))
        self._announced[op] = impl.impl_id

    def counting(self, bound: Callable[..., Any], op: str, impl_id: str) -> Callable[..., Any]:
        """Return `bound` as a function that counts its calls according to `counts`."""
        if not self.counts:
            return bound

        def count() -> int:
            self._asked[op, impl_id] += 1
            return 0

        if self.counts == "tracings":
            from torch._dynamo import assume_constant_result

            count = assume_constant_result(count)  # runs while Dynamo traces

        @functools.wraps(bound)
        def counted(*args: Any, **kwargs: Any) -> Any:
            count()
            return bound(*args, **kwargs)

        return counted

    def _once(self, *what: str) -> bool:
        if what in self._said or len(self._said) >= SAID_AT_MOST:
            return False
        self._said.add(what)
        return True
