"""Objections of the ranks of an engine, and differences between their plans."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import StartError
from ..logs import get_logger
from ..plugins.inspection import FAILED, LACKED, REFUSES, REJECTED, Key, Objection
from ..plugins.types import VLLM_IDS

log = get_logger("engine")


class Disabled(NamedTuple):
    """Why an implementation is disabled on all ranks. `code` is `FAILED`, `LACKED` or `REJECTED`;
    `rank` reported it. For `LACKED`, `why` is the distribution to install on that rank.
    `ends_strict` is whether it fails the startup in strict mode."""

    code: str
    rank: int
    why: str
    ends_strict: bool = True

    @property
    def reason(self) -> str:
        if self.code == FAILED:
            return f"failed at startup on rank {self.rank}: {self.why}"
        if self.code == LACKED:
            return f"missing on rank {self.rank}: {self.why} is not installed there"
        return self.why

    @property
    def remark(self) -> str:
        """A remark for the report, or empty. The warning has the details."""
        if self.code != REJECTED:
            return f"is disabled [{self.code}]"
        return f"supports no call [{self.code}]" if self.why.startswith(REFUSES) else ""

    def warn(self, op: str, impl_id: str) -> None:
        """Log that the implementation is disabled on all ranks. Only rank 0 calls this."""
        rank, why = self.rank, self.why
        here = f"at startup on rank {rank}; disabled on all ranks"
        texts = {
            FAILED: f"failed for op '{op}': {why} (detected {here})",
            LACKED: f"of op '{op}' is disabled on all ranks: it is missing on rank {rank}. "
            f"Install {why} on its node",
            REJECTED: f"is rejected for op '{op}': {why} (measured {here})",
        }
        log.warning("Implementation '%s' %s [%s]", impl_id, texts[self.code], self.code)


@dataclass(frozen=True)
class Opinion:
    """One rank's objections and plan at a moment. `objections` maps (op, impl id) to the reason why
    it must not run. `contents` are facts that the ranks compare: parts of the plan at PLANNED, and
    choices by timing at CACHED.
    `installed` has the (op, impl id) of every implementation on the rank. `table` is why the tuning
    table has no effect on it. `verifiers` are the distributions that verify kernels there."""

    objections: Mapping[Key, Objection]
    contents: Mapping[str, Any] = field(default_factory=dict)
    installed: frozenset[Key] = frozenset()
    unavailable: Mapping[Key, str] = field(default_factory=dict)
    table: str = ""
    verifiers: frozenset[str] = frozenset()


def check_verifiers(opinions: Sequence[Opinion]) -> None:
    """Raise a StartError if a rank lacks a verifier of another rank, which would wait for it."""
    every = frozenset[str]().union(*(each.verifiers for each in opinions))
    for rank, each in enumerate(opinions):
        if missing := sorted(every - each.verifiers):
            raise StartError(
                f"vllm-fl: engine startup failed: {missing[0]} is missing on rank {rank}. Install "
                "it on its node"
            )


def united(opinions: Sequence[Opinion], known: Container[Key]) -> dict[Key, Disabled]:
    """Return (op, impl id) -> why all ranks must disable it, without the keys in `known`."""
    found: dict[Key, Disabled] = {}
    for rank, opinion in enumerate(opinions):
        for key, each in opinion.objections.items():
            found.setdefault(key, Disabled(each.code, rank, each.reason, each.ends_strict))
    for key, missing in lacking(opinions).items():
        found.setdefault(key, missing)
    return {key: disabled for key, disabled in found.items() if key not in known}


def lacking(opinions: Sequence[Opinion]) -> dict[Key, Disabled]:
    """Return (op, impl id) of a rank's plan -> why another rank cannot run it."""
    found: dict[Key, Disabled] = {}
    for rows, impls in (item for each in opinions for item in each.contents.get("ops", {}).items()):
        op = rows.partition("(")[0]
        for impl in impls:
            key = op, impl["impl"]
            for rank, each in enumerate(opinions):
                if key not in each.installed and not key[1].startswith(VLLM_IDS):
                    why = f"{impl['distribution']} {impl['version']}"
                    found.setdefault(key, Disabled(LACKED, rank, why))
                elif key in each.unavailable:
                    why = f"it is not available on rank {rank}: {each.unavailable[key]}"
                    found.setdefault(key, Disabled(REJECTED, rank, why))
    return found


def plan_differences(opinions: Sequence[Opinion]) -> list[str]:
    """Compare the ranks' plans with the plan of rank 0. Return one sentence per difference."""
    lines = []
    base = opinions[0].contents
    for rank, other in enumerate((each.contents for each in opinions[1:]), 1):
        if other == base:
            continue
        ours, others = base.get("ops", {}), other.get("ops", {})
        for op in dict.fromkeys((*ours, *others)):
            impls, theirs = ours.get(op, []), others.get(op, [])
            if impls != theirs:
                lines.append(f"{op}: rank 0 has {_short(impls)}, rank {rank} has {_short(theirs)}")
        for key in sorted({*base, *other} - {"ops"}):
            if base.get(key) != other.get(key):
                has, has_there = _unequal(base.get(key), other.get(key))
                lines.append(f"{key}: rank 0 has {has!r}, rank {rank} has {has_there!r}")
    return lines


def _unequal(one: Any, other: Any) -> tuple[Any, Any]:
    """Return two different values. Mappings are reduced to their different items."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        equal = {key for key in one if key in other and one[key] == other[key]}
        one, other = ({k: v for k, v in each.items() if k not in equal} for each in (one, other))
    return one, other


def _short(impls: list[dict[str, Any]]) -> str:
    return ", ".join(map(_one, impls)) or "none"


def _one(impl: dict[str, Any]) -> str:
    kernels = "".join(f", {name} {kernel}" for name, kernel in impl.get("kernels", {}).items())
    of = f"{impl['distribution']} {impl['version']}"
    return f"{impl['impl']} ({of}, source {impl['source']}{kernels})"
