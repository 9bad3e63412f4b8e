"""The record of what failed, refused and took over: one for each manager, one for each plan."""

from __future__ import annotations

import functools
import logging
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..logs import SAID_AT_MOST
from ..plugins.types import OpImpl
from ..text import quote
from .resolver import describe

__all__ = ["Record", "Skipped"]

Key = tuple[str, str]
"""(op, impl id)."""


class Skipped(Exception):
    """Stands for the first candidate's failure, where it is demoted."""


def _skipped(*_: Any, **__: Any) -> Any:
    raise Skipped


def _calling(impl: OpImpl, fn: Callable[..., Any], supports: Callable[..., Any] | None) -> OpImpl:
    """`impl` with other functions, its own under its signature, which tells whether a layer is
    taken."""
    if fn is impl.fn and supports is impl.supports:
        return impl
    fn = fn if fn is impl.fn else functools.wraps(impl.fn)(fn)
    return replace(impl, fn=fn, supports=supports)


class Record:
    """Counts, says each thing once, and knows what is demoted.

    A demotion switches the guards that were compiled before, so that a call has nothing to look up.

    Args:
        log: where things are said.
        decide: (op, impl id, why) -> whether an implementation that failed is demoted; it calls
            `demote`. None: nothing is, as under a sealed plan, and the failure is raised.
    """

    def __init__(
        self, log: logging.Logger, decide: Callable[[str, str, str], bool] | None = None
    ) -> None:
        self._log, self._decide = log, decide
        self.fallbacks: Counter[Key] = Counter()
        """Calls that this later candidate took over."""
        self.refusals: Counter[Key] = Counter()
        """Calls that this implementation refused."""
        self._asked: Counter[Key] = Counter()
        """Calls of which this is the first candidate; only under VLLM_FL_DISPATCH_DEBUG=1."""
        self._moved: Counter[Key] = Counter()
        """Calls that went to this implementation from another, less those that went from it."""
        self._demoted: defaultdict[str, dict[str, str]] = defaultdict(dict)
        """Op -> impl id -> why. The inner tables are emptied, never replaced: guards know them."""
        self.guards: weakref.WeakSet[Any] = weakref.WeakSet()
        """Every guard that was compiled for it, bare ones too, which a demotion does not switch."""
        self._guards: defaultdict[str, weakref.WeakSet[Any]] = defaultdict(weakref.WeakSet)
        self._announced: dict[str, str] = {}
        self._said: set[tuple[str, ...]] = set()
        self.is_aside = False
        """Whether the counters hold for now what is not to be counted."""

    # What is counted.

    @property
    def calls(self) -> Counter[Key]:
        """Calls, each counted to who computed it; only under VLLM_FL_DISPATCH_DEBUG=1."""
        asked = Counter(self._asked)
        counted = {op for op, _ in asked}
        moved = {key: count for key, count in list(self._moved.items()) if key[0] in counted}
        asked.update(moved)
        return +asked

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
        tables = (self.fallbacks, self.refusals, self._asked, self._moved)
        kept = [Counter(table) for table in tables]
        self.is_aside = True
        try:
            yield
        finally:
            for table, before in zip(tables, kept, strict=True):
                table.clear()
                table.update(before)
            self.is_aside = False

    # What is demoted.

    @property
    def demotions(self) -> dict[Key, str]:
        """(op, impl id) -> why it was demoted."""
        return {
            (op, impl_id): why
            for op, demoted in list(self._demoted.items())
            for impl_id, why in list(demoted.items())
        }

    def demoted(self, op: str) -> Mapping[str, str]:
        """Impl id -> why it was demoted, for one op; always the same object."""
        return self._demoted[op]

    def demote(self, op: str, impl_id: str, why: str) -> None:
        """Demote `impl_id` from now on."""
        self._demoted[op][impl_id] = why
        self._switch(op)

    def end_demotions(self, op: str | None = None) -> None:
        """Take back what was demoted for `op`, or for every op."""
        for name in list(self._demoted):
            if op in (None, name):
                self._demoted[name].clear()
                self._switch(name)

    def clear(self) -> None:
        """Forget everything, as in a process that was forked."""
        self.end_demotions()
        counted = self.fallbacks, self.refusals, self._asked, self._moved
        for table in (*counted, self._announced, self._said):
            table.clear()

    def watch(self, op: str, guard: Callable[..., Any]) -> None:
        """Keep `guard` to its first candidate for as long as that is not demoted."""
        self._guards[op].add(guard)
        self._switch(op, guard)

    @contextmanager
    def replacing(
        self,
        instead: Callable[[OpImpl], Callable[..., Any]],
        asking: Callable[[OpImpl], Callable[..., Any] | None] = lambda impl: impl.supports,
    ) -> Iterator[None]:
        """Inside the block every guard calls `instead(impl)` in the place of each candidate.

        Afterwards the guards are what they were. Inside, nothing may be demoted, and no other
        thread may call them.

        Args:
            instead: a candidate -> a function of the parameters that the candidate's has.
            asking: a candidate -> what is asked in the place of its `supports`.
        """
        scopes = [guard.__globals__ for guard in list(self.guards)]
        names = "_chain", "_fn", "_supports"
        before = [(scope, [scope[name] for name in names]) for scope in scopes]
        try:
            for scope, (chain, fn, supports) in before:
                impls = tuple(_calling(impl, instead(impl), asking(impl)) for impl in chain.impls)
                scope["_chain"] = replace(chain, impls=impls)
                scope["_fn"] = fn if fn is _skipped else impls[0].fn
                scope["_supports"] = supports if supports is _skipped else chain.asked(impls[0])
            yield
        finally:
            for scope, values in before:
                scope.update(zip(names, values, strict=True))

    def _switch(self, op: str, *guards: Any) -> None:
        for guard in guards or list(self._guards[op]):
            scope = guard.__globals__
            first: OpImpl = scope["_chain"].impls[0]
            skips = first.impl_id in self._demoted[op]
            scope["_fn"] = _skipped if skips else first.fn
            scope["_supports"] = _skipped if skips else scope["_chain"].asked(first)

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
        if first.impl_id in self._demoted[op]:
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

    def counting(
        self, bound: Callable[..., Any], op: str, impl_id: str, *, traced: bool = False
    ) -> Callable[..., Any]:
        """`bound` with its calls counted.

        Args:
            bound: what is called.
            op, impl_id: what the calls are counted under.
            traced: count how often a compiler traces it, since no call of traced code is left.
        """

        def count() -> int:
            self._asked[op, impl_id] += 1
            return 0

        if traced:
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
