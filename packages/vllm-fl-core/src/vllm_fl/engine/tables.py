"""Whether the table that the settings name acts here: on this machine, for this model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..plugins.snapshot import RegistrySnapshot
from ..settings.table import DEFAULT, STOCK, Table
from .digest import UNKNOWN
from .facts import EngineFacts
from .identity import THREADS, identity, is_measured

if TYPE_CHECKING:
    import torch

    from ..contracts import ModelSizes
    from ..settings.schema import Settings


@dataclass(frozen=True)
class Standing:
    """What becomes of the table that an engine's settings name, on one rank.

    Args:
        digest: of the table that acts; empty where none does.
        reason: why the one that is named does not, without the last full stop.
        left_out: op -> why its rows do not count.
    """

    digest: str = ""
    reason: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def fault(self) -> str:
        """Why strict mode ends the start: the table that was named does not act, or not whole."""
        left_out = (f"the table's rows of op '{op}': {why}" for op, why in self.left_out.items())
        found = "; ".join(filter(None, (self.reason, *left_out)))
        return f"strict mode, and {found}" if found else ""


def standing(
    facts: EngineFacts,
    snapshot: RegistrySnapshot,
    device: torch.device | None,
    *,
    serves: bool = True,
) -> Standing:
    """What becomes of the table on this rank.

    Args:
        facts: what the engine's configuration says.
        snapshot: what is installed.
        device: on which the model runs; None in the process that makes the configuration, which
            must not open a device: what can be told without one is checked.
        serves: as for `here`.
    """
    pinned = facts.settings.pinned
    if pinned is None:
        return Standing()
    table = pinned.table
    why = _other_engine(table, facts)
    if why is None and device is not None:
        why = table.differs(here(table, snapshot, device, serves=serves))
    if why is not None:
        why += ". `vllm-fl tune --model DIR` measures another"
    else:
        why = unaccepted(facts.settings)
    if why is not None:
        return Standing(reason=f"The {pinned.label} has no effect: {why}")
    return Standing(pinned.digest, left_out=left_out(table, snapshot))


def under(facts: EngineFacts, table: Standing) -> EngineFacts:
    """`facts` with the orders of the table, if it acts, and those for the engine's device."""
    settings, tuned = facts.settings, frozenset[str]()
    if settings.pinned is not None and table.digest:
        tuned = frozenset(settings.pinned.table.ops.keys() - table.left_out.keys())
        settings = settings.with_table(table.left_out)
    settings = settings.with_devices(facts.device, facts.mode, tuned)
    return facts if settings is facts.settings else dataclasses.replace(facts, settings=settings)


def here(
    table: Table, snapshot: RegistrySnapshot, device: torch.device, *, serves: bool = True
) -> dict[str, str]:
    """The identity of what runs here in the place of what the table was measured with.

    A backend that it was not measured with is not among it: its times are not those of another.

    Args:
        table: the table.
        snapshot: what is installed.
        device: on which it runs.
        serves: whether this process serves a model. How many threads an engine has is not known
            in another one.
    """
    known = (*snapshot.owners.values(), *snapshot.authors.values())
    owners = {owner.label: owner for owner in known}
    named = [name for name in sorted(owners) if name in table.identity]
    found = identity(device, (owners[name] for name in named))
    if not serves and {THREADS} <= found.keys() & table.identity.keys():
        found[THREADS] = table.identity[THREADS]
    for name in named:  # a release whose code is the same is as fast as it was measured
        then = table.identity[name]
        code = then.partition(" ")[2]
        if code not in ("", UNKNOWN) and code == found.get(name, "").partition(" ")[2]:
            found[name] = then
    return found


def unaccepted(settings: Settings) -> str | None:
    """Why a table may not act that nobody accepted, or None where it may."""
    pinned = settings.pinned
    if pinned is None or settings.table_unaccepted:
        return None
    verdict = pinned.table.accepted
    if verdict is not None and verdict.accepted:
        return None
    found = f"not accepted: {verdict.reason}" if verdict is not None else "never accepted"
    return (
        f"it was {found}. Run `vllm-fl tune --accept {pinned.file} --model DIR` with the model "
        "that it was measured for, or set VLLM_FL_TABLE_UNACCEPTED=1"
    )


def left_out(table: Table, snapshot: RegistrySnapshot) -> dict[str, str]:
    """op -> why its rows do not count, though the table holds."""
    found = {}
    for op, tuned in table.ops.items():
        spec = snapshot.contracts.get(op)
        absent = [
            row.impl
            for row in tuned.rows
            if row.impl not in (DEFAULT, STOCK) and snapshot.find(op, row.impl) is None
        ]
        if spec is None:
            found[op] = "no contract names it"
        elif not is_measured(spec, tuned.contract):
            found[op] = "its contract is another one than was measured"
        elif not spec.by_token:
            found[op] = "its calls have no number of tokens"
        elif absent:
            found[op] = f"'{absent[0]}' is not installed"
    return found


def _other_engine(table: Table, facts: EngineFacts) -> str | None:
    """The first thing of the engine that is not as it was measured, or None."""
    if table.mode != facts.mode:
        return f"it was measured for {table.mode} engines, and this one is {facts.mode}"
    if facts.dtype is None:  # of any model
        return None
    dtype = str(facts.dtype).removeprefix("torch.")
    if table.dtype != dtype:
        return f"it was measured in {table.dtype}, and the model has {dtype}"
    for name, size in _told(facts.sizes).items() if facts.sizes is not None else ():
        if (measured := table.sizes.get(name, size)) != size:
            return f"it was measured with {name} {measured:g}, and the model has {size:g}"
    return None


def _told(sizes: ModelSizes) -> dict[str, float]:
    """The sizes for which a table holds, by name, as far as the model's configuration tells them.

    Neither the batch nor the length is among them: they change which rows are used, not which
    hold.
    """
    own = dataclasses.asdict(dataclasses.replace(sizes, more={}))
    told = {name: value for name, value in own.items() if isinstance(value, int | float)}
    del told["max_position"]
    return told | {name: value for name, value in sizes.more.items() if value is not None}
