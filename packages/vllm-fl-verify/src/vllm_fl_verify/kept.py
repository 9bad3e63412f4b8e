"""The kept verdicts of one engine: read before verification, and written when the engine serves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vllm_fl.integration.engines import Engine
from vllm_fl.integration.settling import choices
from vllm_fl.logs import get_logger
from vllm_fl.plugins.inspection import FAILED, Key, Objection
from vllm_fl.text import quote

from .budget import Valve
from .trials import Request, Role
from .verdict_key import verdict_parts
from .verdicts import KeptVerdict, read_verdict, write_fault, write_verdict

log = get_logger("engine")


class EngineVerdicts:
    """A verification of some roles has one verdict on each rank. It is used only if all ranks have
    it, and no rank finds a fault.

    Attributes:
        is_used: whether this engine reads and writes verdicts. The same on all ranks.
        is_void: whether a rank has found a fault that the full verification had not found.
    """

    def __init__(self, engine: Engine, valve: Valve) -> None:
        self.engine, self._valve, self.is_void, self._current = engine, valve, False, ""
        facts = engine.facts
        self.is_used = facts.settings.compares and not engine.joins and not facts.wants_invariance
        self._verdicts: dict[str, KeptVerdict] = {}
        """Key -> verdict, of all verifications of this startup."""
        self._known: dict[str, KeptVerdict] = {}
        """Key -> verdict that was read."""
        if self.is_used:
            engine.on_serving(self.write)

    def agreed(self, request: Request) -> frozenset[str]:
        """Return the names of the roles that passed an earlier verification on all ranks. The
        result is empty from the first fault of any rank on."""
        if not self.is_used:
            return frozenset()
        every = self.engine.gather("compare kept verdicts", self._read(request))
        self.is_void |= None in every
        return frozenset.intersection(*(each or frozenset() for each in every))

    def _read(self, request: Request) -> frozenset[str] | None:
        """Return this rank's names for `agreed`; None if it has found a fault."""
        self._current = ""
        if self.is_void or not request.roles:
            return None if self.is_void else frozenset()
        try:
            parts = verdict_parts(self.engine, request)
        except Exception as error:  # it reads files, and objects of vLLM and of plugins
            log.warning("Verdicts are not kept, since their key is unknown: %s", quote(error))
            return frozenset()
        verdict = KeptVerdict(parts)
        self._current, self._verdicts[verdict.key] = verdict.key, verdict
        is_full = self.engine.facts.settings.preflight == "full"
        self._known[self._current] = known = (not is_full and read_verdict(parts)) or verdict
        return known.passed

    def is_tuned_differently(self, roles: Iterable[Role]) -> bool:
        """Whether a kept role has made other choices by timing than when it was verified."""
        now = self._choices(role for role in roles if role.kept)
        before = self._known[self._current].choices if now else {}
        return any(_differ(before.get(name), chosen) for name, chosen in now.items())

    def record(self, roles: Iterable[Role], objections: Mapping[Key, Objection]) -> None:
        """Note the result of the verification after the last `agreed`."""
        roles = [*roles]
        kept = {role.key for role in roles if role.kept}
        self.refute({key: each for key, each in objections.items() if key in kept})
        if self._current in self._verdicts:
            passed = frozenset(role.name for role in roles if role.key not in objections)
            parts, chosen = self._verdicts[self._current].parts, self._choices(roles)
            self._verdicts[self._current] = KeptVerdict(parts, passed, chosen)

    def _choices(self, roles: Iterable[Role]) -> dict[str, Any]:
        of = {role.key: role.name for role in roles if role.impl.choices is not None}
        found = choices(self.engine.plan).items() if of else ()
        return {of[key]: chosen for key, chosen in found if key in of}

    def refute(self, objections: Mapping[Key, Objection]) -> None:
        """Record faults that the full verification had not found, for later startups."""
        for key, each in objections.items():
            if each.code == FAILED and self.is_used:
                self.is_void = True
                for name in self._verdicts:
                    write_fault(name, key, each.reason)

    def write(self) -> None:
        """Write the verdicts of full verifications."""
        if self.is_void or self._valve.is_overdue:
            return
        for key, verdict in self._verdicts.items():
            if verdict.passed and verdict != self._known.get(key):
                write_verdict(verdict)


def _differ(before: Any, now: Any) -> bool:
    """Whether choices differ. Choices for calls that only one of two startups made are ignored."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return any(before[call] != now[call] for call in before.keys() & now.keys())
    return bool(before != now)
