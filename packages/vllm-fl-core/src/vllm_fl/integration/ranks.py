"""Agreement between the ranks of one engine: what failed on one is demoted on all."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from ..errors import StartError
from ..logs import get_logger
from ..plugins.inspection import FAILED, LACKED, REFUSES, REJECTED, Key, Objection
from .exchange import gathered, introduce

T = TypeVar("T")

log = get_logger("engine")


class Disabled(NamedTuple):
    """Why an implementation is off on all ranks.

    Attributes:
        code: `FAILED`, `LACKED` or `REJECTED`.
        rank: of the rank that fails, lacks or rejects it.
        why: the reason; of one that is lacked, what to install there.
        ends_strict: whether strict mode ends the startup for it.
    """

    code: str
    rank: int
    why: str
    ends_strict: bool = True

    @property
    def reason(self) -> str:
        """What the plan and the report say."""
        if self.code == FAILED:
            return f"failed at start on rank {self.rank}: {self.why}"
        if self.code == LACKED:
            return f"rank {self.rank} lacks it: {self.why} is not installed there"
        return self.why

    @property
    def told(self) -> str:
        """What the report remarks, if anything: the warning has said the whole of it."""
        if self.code != REJECTED:
            return f"was taken out [{self.code}]"
        return f"refuses every call [{self.code}]" if self.why.startswith(REFUSES) else ""

    def warn(self, op: str, impl_id: str) -> None:
        """Log that it is off on all ranks; rank 0 does."""
        rank, why = self.rank, self.why
        here = f"at start, on rank {rank}; off on all"
        texts = {
            FAILED: f"failed for op '{op}': {why} (found {here})",
            LACKED: f"of op '{op}' is off on all ranks: rank {rank} lacks it. Install {why} on its "
            "node",
            REJECTED: f"is rejected for op '{op}': {why} (measured {here})",
        }
        log.warning("Implementation '%s' %s [%s]", impl_id, texts[self.code], self.code)


def publish_process() -> None:
    """Let the other ranks check this one if it is late for their first exchange."""
    from torch.distributed import is_initialized
    from vllm.distributed.parallel_state import get_world_group

    if is_initialized() and get_world_group().world_size > 1:
        introduce(get_world_group().cpu_group)


def exchange(what: str, mine: T, failure: str = "") -> list[T]:
    """Return every rank's value, in the order of the ranks.

    A worker knows its number within its own engine. vLLM joins the data-parallel engines of a
    mixture of experts into one world, whose numbers the errors have.

    Args:
        what: the purpose, as `settle on a plan`; all ranks exchange the same in the same order.
        mine: this rank's value; it is pickled.
        failure: why this rank cannot go on, or empty.

    Raises:
        StartError: a rank has failed, died or is too late, or the ranks do not exchange the same;
            with `failures`.
    """
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    message = what, failure, mine
    try:
        found = gathered(message, group.cpu_group, group.world_size, group.rank, what)
    except RuntimeError as error:  # all ranks that live know it
        raise StartError(str(error), failures=[str(error)]) from error
    steps = [step for step, _, _ in found]
    failures = [f"rank {rank}: {why}" for rank, (_, why, _) in enumerate(found) if why]
    if not failures and len({*steps}) > 1:
        failures = [f"rank {n}: it is at another step ({step})" for n, step in enumerate(steps)]
    if failures:
        raise StartError(f"vllm-fl ends the start: {'; '.join(failures)}", failures=failures)
    return [value for _, _, value in found]


@dataclass(frozen=True)
class Opinion:
    """What one rank says of its plan at a moment.

    Args:
        objections: (op, impl id) -> why it must not serve.
        contents: what its plan consists of; empty if the plan was agreed on before.
        installed: (op, impl id) of all that is installed there.
        unavailable: (op, impl id) -> why it is not available there.
        table: why the table that its settings name has no effect there; empty if it has.
    """

    objections: Mapping[Key, Objection]
    contents: Mapping[str, Any] = field(default_factory=dict)
    installed: frozenset[Key] = frozenset()
    unavailable: Mapping[Key, str] = field(default_factory=dict)
    table: str = ""


def united(opinions: Sequence[Opinion], known: Container[Key]) -> dict[Key, Disabled]:
    """Return what no rank may serve with: (op, impl id) -> why.

    Args:
        opinions: every rank's.
        known: what is disabled already.
    """
    found: dict[Key, Disabled] = {}
    for rank, opinion in enumerate(opinions):
        for key, each in opinion.objections.items():
            found.setdefault(key, Disabled(each.code, rank, each.reason, each.ends_strict))
    for key, missing in lacking(opinions).items():
        found.setdefault(key, missing)
    return {key: disabled for key, disabled in found.items() if key not in known}


def lacking(opinions: Sequence[Opinion]) -> dict[Key, Disabled]:
    """Return what one rank would serve with, and another one does not have."""
    found: dict[Key, Disabled] = {}
    for rows, impls in (item for each in opinions for item in each.contents.get("ops", {}).items()):
        op = rows.partition("(")[0]  # of one that is ordered by size, a row
        for impl in impls:
            key = op, impl["impl"]
            for rank, each in enumerate(opinions):
                if key not in each.installed:
                    why = f"{impl['distribution']} {impl['version']}"
                    found.setdefault(key, Disabled(LACKED, rank, why))
                elif key in each.unavailable:
                    why = f"it is not available on rank {rank}: {each.unavailable[key]}"
                    found.setdefault(key, Disabled(REJECTED, rank, why))
    return found


def differences(opinions: Sequence[Opinion]) -> list[str]:
    """Return how the ranks' plans differ from rank 0's, one sentence each."""
    lines = []
    base = opinions[0].contents
    for rank, other in enumerate((each.contents for each in opinions[1:]), 1):
        if other == base:
            continue
        ours, others = base.get("ops", {}), other.get("ops", {})
        for op in dict.fromkeys((*ours, *others)):  # a row of one that is ordered by size too
            impls, theirs = ours.get(op, []), others.get(op, [])
            if impls != theirs:
                lines.append(f"{op}: rank 0 has {_short(impls)}, rank {rank} has {_short(theirs)}")
        rest = {k for k in base if k != "ops" and base[k] != other.get(k)}
        lines += [
            f"{key}: rank 0 has {base[key]!r}, rank {rank} has {other.get(key)!r}"
            for key in sorted(rest)
        ]
    return lines


def _short(impls: list[dict[str, Any]]) -> str:
    return ", ".join(map(_one, impls)) or "none"


def _one(impl: dict[str, Any]) -> str:
    kernels = "".join(f", {name} {told}" for name, told in impl.get("kernels", {}).items())
    of = f"{impl['distribution']} {impl['version']}"
    return f"{impl['impl']} ({of}, source {impl['source']}{kernels})"
