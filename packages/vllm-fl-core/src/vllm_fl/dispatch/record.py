"""The record of what failed, refused and took over: one for each manager, one for each plan."""

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
from .resolver import describe


class Skipped(Exception):
    """Stands for the first candidate's failure, where it is demoted."""


class Record:
    """Counts, says each thing once, and knows what is demoted.

    A demotion switches the guards that were compiled before, so that a call has nothing to look up.

    Example: A is the first candidate of an op, refuses one of two calls, and B computes that one.
    Then `refusals` has A: 1, and `fallbacks` has B: 1. If calls are counted, `_asked` has A: 2,
    `_moved` has A: -1 and B: 1, and `calls`, their sum, has A: 1 and B: 1.

    Args:
        log: where things are said.
        decide: (op, impl id, why) -> whether an implementation that failed is demoted; it calls
            `demote`. None: nothing is, as under a sealed plan, and the failure is raised.
    """

    def __init__(
        self, log: logging.Logger, decide: Callable[[str, str, str], bool] | None = None
    ) -> None:
        self._log, self._decide = log, decide
        self.counts: Literal["", "calls", "tracings"] = ""
        """Calls are not counted, or each of them is, or how often a compiler traces one: it leaves
        no call of traced code behind. An opaque operator is never traced."""
        self.fallbacks: Counter[Key] = Counter()
        """Calls that this later candidate took over."""
        self.refusals: Counter[Key] = Counter()
        """Calls that this implementation refused."""
        self.failures: dict[Key, str] = {}
        """What this implementation raised last."""
        self._asked: Counter[Key] = Counter()
        """Calls of which this is the first candidate; only under VLLM_FL_COUNT_CALLS=1."""
        self._moved: Counter[Key] = Counter()
        """Calls that went to this implementation from another, less those that went from it."""
        self.demotions: dict[Key, str] = {}
        """Why an implementation was demoted."""
        self.guards: weakref.WeakSet[Any] = weakref.WeakSet()
        """Every `Guard` that was compiled for it. A demotion does not switch bare ones."""
        self._announced: dict[str, str] = {}
        self._said: set[tuple[str, ...]] = set()
        self.is_aside = False
        """Whether the counters hold for now what is not to be counted."""

    # What is counted.

    @property
    def calls(self) -> Counter[Key]:
        """Calls, each counted to who computed it; only under VLLM_FL_COUNT_CALLS=1."""
        counted = {op for op, _ in list(self._asked)}
        moved = {key: count for key, count in list(self._moved.items()) if key[0] in counted}
        return self._asked + Counter(moved)

    def passed_over(self) -> dict[Key, str]:
        """Those that refused calls of which they are the first candidate and, all in all, left more
        to others than they took over: (op, impl id) -> a reason that they gave."""
        reasons = {what[1:3]: what[3] for what in sorted(self._said) if what[0] == "refused"}
        return {
            key: reasons.get(key, "the log has the reasons")
            for key, count in self._moved.items()
            if count < 0 and self.refusals[key]
        }

    def begin(self, *, keeps_calls: bool = False) -> None:
        """Count calls from now on. What a model was built with stays: such a choice is no call.

        Args:
            keeps_calls: whether the calls so far stay counted, as tracings do.
        """
        calls = self.calls if keeps_calls else Counter[Key]()
        for key in set(self._moved) & set(self.fallbacks):
            del self.fallbacks[key]
        for table in (self._asked, self._moved, self.refusals):
            table.clear()
        self._asked.update(calls)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is called inside the block is not counted; `is_aside` says so to other threads."""
        kept = self.fallbacks, self.refusals, self._asked, self._moved
        self.fallbacks, self.refusals, self._asked, self._moved = map(Counter, kept)
        self.is_aside = True
        try:
            yield
        finally:
            self.fallbacks, self.refusals, self._asked, self._moved = kept
            self.is_aside = False

    # What is demoted.

    def demote(self, op: str, impl_id: str, why: str) -> None:
        """Demote `impl_id` from now on."""
        self.demotions[op, impl_id] = why
        self._switch(op)

    def end_demotions(self, op: str | None = None) -> None:
        """Take back what was demoted for `op`, or for every op."""
        for name, impl_id in list(self.demotions):
            if op in (None, name):
                del self.demotions[name, impl_id]
                self._switch(name)

    def clear(self) -> None:
        """Forget everything, as in a process that was forked."""
        self.end_demotions()
        counted = self.fallbacks, self.refusals, self._asked, self._moved
        for table in (*counted, self.failures, self._announced, self._said):
            table.clear()

    def watch(self, guard: Any) -> None:
        """Keep `guard` to its first candidate for as long as that is not demoted."""
        self.guards.add(guard)
        guard.switch()

    def _switch(self, op: str) -> None:
        for guard in list(self.guards):
            if guard.chain.op == op:
                guard.switch()

    # What happened.

    def left(self, op: str, first: OpImpl) -> None:
        """The `first` candidate did not compute one call, whoever does."""
        self._moved[op, first.impl_id] -= 1

    def refused(self, op: str, impl: OpImpl, reason: str) -> None:
        """`impl` refused one call before it started."""
        self.refusals[op, impl.impl_id] += 1
        if self._once("refused", op, impl.impl_id, reason):
            self._log.info("Implementation '%s' refused op '%s': %s", impl.impl_id, op, reason)

    def failed(self, op: str, impl: OpImpl, error: Exception, *, last: bool) -> bool:
        """`impl` failed; it was the `last` candidate. Whether it is demoted; otherwise raise."""
        self.failures[op, impl.impl_id] = quote(error)
        why = f"failed earlier: {quote(error)}"
        demoted = self._decide is not None and self._decide(op, impl.impl_id, why)
        who = "Last implementation" if demoted and last else "Implementation"
        level = logging.WARNING if demoted and not last else logging.ERROR
        self._log.log(level, f"{who} '%s' failed for op '%s': %s", impl.impl_id, op, error)
        return demoted

    def fell_back(self, op: str, first: OpImpl, impl: OpImpl) -> None:
        """`impl`, a later candidate, took over one call from the `first`."""
        self.fallbacks[op, impl.impl_id] += 1
        self._moved[op, impl.impl_id] += 1
        if self._once("fallback", op, first.impl_id, impl.impl_id):
            self._log.info("Op '%s' fallback to %s", op, describe(impl))
        if (op, first.impl_id) in self.demotions:
            self._announced[op] = impl.impl_id

    def unfounded(self, op: str, impl: OpImpl) -> None:
        """`impl` runs at a size that is vLLM's own, since its place has no form of it to call."""
        if self._once("unfounded", op, impl.impl_id):
            self._log.warning(
                "Op '%s' is vLLM's own at some sizes, and one of its places has no form of it that "
                "can be called (its binding's native): '%s' runs there",
                op,
                impl.impl_id,
            )

    def announce(self, op: str, impl: OpImpl) -> None:
        """Say what `op` was resolved to, where that is news."""
        before = self._announced.get(op)
        if before is None:
            self._log.info("Op '%s' using %s", op, describe(impl))
        elif before != impl.impl_id:
            self._log.info("Op '%s' switched from '%s' to %s", op, before, describe(impl))
        self._announced[op] = impl.impl_id

    def counting(self, bound: Callable[..., Any], op: str, impl_id: str) -> Callable[..., Any]:
        """`bound`, with its calls counted under `op` and `impl_id` as `counts` says."""
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
