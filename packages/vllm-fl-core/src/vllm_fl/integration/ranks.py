"""Agreement between the ranks of one engine: what failed on one is demoted on all."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from ..engine.tables import Standing
from ..logs import get_logger

T = TypeVar("T")

log = get_logger("engine")

TIMEOUT = timedelta(minutes=10)
"""How long the first rank to finish waits for the others: a cold kernel cache may cost one of them
minutes. One that died is noticed at once, by its closed connection."""


UNUSED = 48
"""A tag of messages under which none is sent."""

FAILED, LACKED, REJECTED = "FL410", "FL411", "FL412"
"""Why an implementation is out: the code of the warning that says so."""

REFUSES = "it refuses every call of this model"
"""What the reason of a rejection begins with, of what is right and takes none of them."""


Key = tuple[str, str]
"""(op, impl id)."""


class Disabled(NamedTuple):
    """Why an implementation is off on all ranks.

    Attributes:
        code: `FAILED`, `LACKED` or `REJECTED`.
        rank: of the rank that fails, lacks or rejects it.
        why: the reason; of one that is lacked, what to install there.
    """

    code: str
    rank: int
    why: str

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
        """Say that it is off on all ranks; rank 0 does."""
        impl, rank, why = f"Implementation '{impl_id}'", self.rank, self.why
        if self.code == FAILED:
            told = (
                f"{impl} failed for op '{op}': {why} (found at start, on rank {rank}; off on all)"
            )
        elif self.code == LACKED:
            told = (
                f"{impl} of op '{op}' is off on all ranks: rank {rank} lacks it. Install {why} on "
                "its node"
            )
        else:
            told = (
                f"{impl} is rejected for op '{op}': {why} (measured at start, on rank {rank}; off "
                "on all)"
            )
        log.warning("%s [%s]", told, self.code)


@dataclass(frozen=True)
class Ran:
    """What a rank saw of the implementations while it ran its part of the loaded model.

    Args:
        refused: (op, impl id) -> a reason, of those that took none of the calls of which they are
            the first candidate.
        served: (op, impl id) of those that computed a call.
        reached: the ops that were called.
        untold: the ops of which such a run does not tell whether this engine calls them.
    """

    refused: dict[tuple[str, str], str]
    served: frozenset[tuple[str, str]]
    reached: frozenset[str]
    untold: frozenset[str]


@dataclass(frozen=True)
class Verdict:
    """What one rank found.

    Args:
        rank: its number among all ranks, those of other data-parallel engines too.
        faults: (op, impl id) -> why it must not serve.
        rejections: (op, impl id) -> why what is right may not serve all the same.
        failure: the error that ends the start on this rank, or empty.
        facts: what its plan consists of.
        table: what became of the table that its settings name.
        counts: the token counts at which it wants the loaded model run on live tensors. All ranks
            run all of these, since a forward of one waits for the others.
        installed: (op, impl id) of every implementation that its plugins brought.
        ran: what the loaded model showed here; None where it was not run, or not to its end.
        differs: what differs from the lock, a sentence each.
    """

    rank: int
    faults: dict[tuple[str, str], str] = field(default_factory=dict)
    failure: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    table: Standing = field(default_factory=Standing)
    counts: frozenset[int] = frozenset()
    rejections: dict[tuple[str, str], str] = field(default_factory=dict)
    installed: frozenset[tuple[str, str]] = frozenset()
    ran: Ran | None = None
    differs: tuple[str, ...] = ()


def agree(mine: Verdict) -> list[Verdict]:
    """Every rank's verdict, in the order of the ranks.

    A worker knows its number within its own engine. vLLM joins the data-parallel engines of a
    mixture of experts into one world, where each verdict has the number that it has there.

    Raises:
        RuntimeError: a rank died, or did not answer in time; the message says which.
    """
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    if group.world_size == 1:
        return [mine]
    mine = replace(mine, rank=group.rank)
    return gathered(mine, group.cpu_group, group.world_size, mine.rank, "verify their kernels")


def gathered(mine: T, cpu_group: Any, size: int, rank: int, what: str) -> list[T]:
    """What every rank of a group gives, in the order of the ranks.

    Args:
        mine: what this rank gives; it is pickled.
        cpu_group: torch.distributed's group, of its backend gloo.
        size: how many ranks it has.
        rank: this rank's number among all.
        what: what the ranks are at, for the error.

    Raises:
        RuntimeError: a rank died, or did not answer in time; the message says which.
    """
    import torch.distributed as dist

    if size == 1:
        return [mine]
    told: list[Any] = [None] * size
    try:
        dist.monitored_barrier(cpu_group, timeout=TIMEOUT, wait_all_ranks=True)
        dist.all_gather_object(told, mine, group=cpu_group)
    except RuntimeError as error:
        gone = _gone(cpu_group, size, rank)
        named = f" ({', '.join(f'rank {n}' for n in gone)})" if gone else ""
        raise RuntimeError(
            f"vllm-fl: rank {rank} waited for the other ranks to {what}, and one of them is gone"
            f"{named}: {error}. Its own log, above, says why."
        ) from error
    return told


def _gone(cpu_group: Any, size: int, rank: int) -> list[int]:
    """Which ranks have closed their connection with this one.

    The barrier names those that do not come, and not one that died before it began. Nothing can be
    received from that one any more; from all others nothing is waited for.
    """
    import torch

    gone = []
    for other in range(size):
        try:
            if other != rank:
                cpu_group.recv([torch.empty(1)], other, UNUSED)
        except RuntimeError:
            gone.append(other)
    return gone


def common_table(verdicts: list[Verdict]) -> Standing:
    """What becomes of the table on all ranks: where one differs, none of them has any."""
    first = verdicts[0].table
    if len({verdict.table.digest for verdict in verdicts}) > 1:
        each = (f"rank {v.rank} has {v.table.digest or v.table.reason or 'none'}" for v in verdicts)
        return Standing(reason=f"The ranks have different tables: {'; '.join(each)}")
    if not first.digest:
        return first
    left_out = {op: why for v in reversed(verdicts) for op, why in v.table.left_out.items()}
    return Standing(first.digest, left_out=left_out)


def lacking(verdicts: list[Verdict]) -> dict[tuple[str, str], Disabled]:
    """What one rank would serve with, and another one does not have."""
    found: dict[tuple[str, str], Disabled] = {}
    for rows, impls in (item for v in verdicts for item in v.facts.get("ops", {}).items()):
        op = rows.partition("(")[0]  # of one that is ordered by size, a row
        for impl in impls:
            key = op, impl["impl"]
            rank = next((v.rank for v in verdicts if key not in v.installed), None)
            if rank is not None and key not in found:
                found[key] = Disabled(LACKED, rank, f"{impl['distribution']} {impl['version']}")
    return found


def refusing(verdicts: list[Verdict]) -> dict[tuple[str, str], Disabled]:
    """What took no call of the loaded model on any rank.

    Nothing where a rank did not run its part: there it may serve.
    """
    runs = [(v.rank, v.ran) for v in verdicts if v.ran is not None]
    if len(runs) < len(verdicts):
        return {}
    served = frozenset[tuple[str, str]]().union(*(ran.served for _, ran in runs))
    return {
        key: Disabled(REJECTED, rank, f"{REFUSES} ({why})")
        for rank, ran in reversed(runs)
        for key, why in ran.refused.items()
        if key not in served
    }


def differences(verdicts: list[Verdict]) -> list[str]:
    """Where the ranks' plans differ from rank 0's, one sentence each."""
    lines = []
    base = verdicts[0]
    for other in verdicts[1:]:
        if other.facts == base.facts:
            continue
        ours, others = base.facts.get("ops", {}), other.facts.get("ops", {})
        for op in dict.fromkeys((*ours, *others)):  # a row of one that is ordered by size too
            impls, theirs = ours.get(op, []), others.get(op, [])
            if impls != theirs:
                lines.append(
                    f"{op}: rank {base.rank} has {_short(impls)}, rank {other.rank} has "
                    f"{_short(theirs)}"
                )
        rest = {k for k in base.facts if k != "ops" and base.facts[k] != other.facts.get(k)}
        lines += [
            f"{key}: rank {base.rank} has {base.facts[key]!r}, rank {other.rank} has "
            f"{other.facts.get(key)!r}"
            for key in sorted(rest)
        ]
    return lines


def _short(impls: list[dict[str, Any]]) -> str:
    return ", ".join(map(_one, impls)) or "none"


def _one(impl: dict[str, Any]) -> str:
    kernels = "".join(f", {name} {told}" for name, told in impl.get("kernels", {}).items())
    of = f"{impl['distribution']} {impl['version']}"
    return f"{impl['impl']} ({of}, source {impl['source']}{kernels})"
