"""The table that `vllm-fl tune` writes: per op and token count what was measured and what won.

A value and its file, no more: `vllm-fl tune` measures it, and `engine/tables.py` decides whether it
applies.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .policy import Mode, OpOrder, Token, joined
from .sealed import hash_of, read_json
from .values import wrong

VERSION = 1
"""Of the file's form. Another one is not read."""

MAX_BYTES = 16 * 2**20

ANEW = "Tune again, or fetch it again"

DEFAULT = "default"
"""In a row: what the policy chooses without the table, which nobody beat."""

STOCK = "stock"
"""In a row: vLLM's own path."""


@dataclass(frozen=True)
class Figure:
    """What one implementation of an op gave at one number of tokens.

    An op that a model calls in several forms (a norm with and without a residual) is measured in
    each; times are their sum.

    Args:
        tokens: rows of the call.
        impl: its id, or `stock`.
        us: the median time of a call, µs; None where it was not timed.
        low, high: the quartiles, µs.
        n: how many times it was timed.
        ratio: the default's time by this one's, the median of pairs measured next to each other;
            above 1 it is faster than the default.
        ratio_low: the lower quartile of those.
        copy_share: the share of the device's copy bandwidth that the call reaches; None where the
            bytes that it moves are not known.
        slower: in which of the forms it is slower than the default, and the ratio there, since how
            often a model calls each form is not known; or that it is slower to launch, at sizes of
            which no graph is captured. A slower implementation gets no row. Empty otherwise.
        rejected: why it was not timed: wrong, with its worst element, or refused; empty otherwise.
    """

    tokens: int
    impl: str
    us: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    ratio: float | None = None
    ratio_low: float | None = None
    copy_share: float | None = None
    slower: str = ""
    rejected: str = ""


@dataclass(frozen=True)
class Row:
    """What serves calls of up to so many tokens, and more than the row before has.

    Args:
        up_to: the largest number of tokens.
        impl: an implementation's id, `stock`, or `default`.
    """

    up_to: int
    impl: str


@dataclass(frozen=True)
class TunedOp:
    """One op of a table.

    Args:
        contract: the digest of the contract that its implementations were held to, as
            `contract_digest` gives it.
        default: what ran without the table: an implementation's id, or `stock`.
        rows: in ascending order. Calls of more tokens than the last one has take the default.
        figures: what the rows were chosen by.
    """

    contract: str
    default: str
    rows: tuple[Row, ...]
    figures: tuple[Figure, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What `vllm-fl tune --accept` found.

    Args:
        accepted: whether the table may act without being told to.
        reason: why, in one sentence.
        date: ISO 8601, UTC.
        figures: what was measured, by name: `ratio`, its quartiles, rounds.
    """

    accepted: bool
    reason: str
    date: str
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """What was measured, on what, and what won.

    Args:
        identity: what the figures hold for, by name (`device`, `driver`, `torch`, `vllm-fl-cuda`
            with its version and the hash of its code): a machine on which one of them differs is
            another one.
        mode: how the engine runs the model for which it was measured.
        dtype: the model's, as torch names it.
        sizes: the model's sizes on one rank, by name.
        model: what was tuned for, as the user named it; for the reader alone.
        date: when it was written, ISO 8601, UTC.
        seconds: how long the measuring took.
        ops: op -> what won.
        accepted: the verdict of `vllm-fl tune --accept`; None before it.
    """

    identity: Mapping[str, str]
    mode: Mode
    dtype: str
    sizes: Mapping[str, float]
    model: str
    date: str
    seconds: float
    ops: Mapping[str, TunedOp]
    accepted: Verdict | None = None

    @cached_property
    def digest(self) -> str:
        """A hash of all that it says but the verdict, 16 hexadecimal digits.

        A verdict changes no plan: code that was compiled before it is used again.
        """
        return hash_of(dataclasses.asdict(dataclasses.replace(self, accepted=None)))

    @cached_property
    def seal(self) -> str:
        """What its file has for a digest: a hash of all of it, the verdict or its lack included."""
        return hash_of({"sealed": True, **dataclasses.asdict(self)})

    @property
    def text(self) -> str:
        """The content of its file."""
        whole = dataclasses.asdict(self)
        for op in whole["ops"].values():
            op["figures"] = [
                {name: value for name, value in figure.items() if value not in (None, "")}
                for figure in op["figures"]
            ]
        told = {"vllm_fl_table": VERSION, "digest": self.seal, **whole}
        return json.dumps(told, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def differs(self, identity: Mapping[str, str]) -> str | None:
        """The first thing of `identity` that is not as it was measured, or None.

        Distributions that are only here, or only there, differ too.
        """
        for name in sorted({*self.identity, *identity}):
            then, now = self.identity.get(name), identity.get(name)
            if then != now:
                return f"{name} is {now or 'not there'}; it was measured with {then or 'none'}"
        return None


@dataclass(frozen=True)
class Pinned:
    """A table that the settings name, as an engine's processes have it.

    Args:
        file: the file that it was read from, in the process that read the settings.
        digest: the digest of that file.
        table: its content; in other processes without the figures, which nobody there needs.
    """

    file: str
    digest: str
    table: Table

    @classmethod
    def read(cls, path: str, origin: str) -> Pinned:
        """Read the file that a setting names. Arguments and errors as for `read_table`."""
        table = read_table(path, origin=origin)
        return cls(path, table.digest, table)

    @property
    def label(self) -> str:
        """`table FILE (digest)`."""
        return f"table {self.file} ({self.digest})"

    @property
    def origin(self) -> str:
        """Where an order that it makes comes from."""
        device = self.table.identity.get("device", "a device without a name")
        return f"table {self.file}, measured {self.table.date[:10]} on {device}"

    def order(self, op: str, base: tuple[Token, ...], without: OpOrder | None) -> OpOrder:
        """The order of one of its ops, in its mode; the other mode stays as it is.

        Args:
            op: the op.
            base: the op's order in an engine of this mode without the table.
            without: the list that the op has without the table, or None.
        """
        measured = [(row.up_to, _tokens_of(row, base)) for row in self.table.ops[op].rows]
        order = OpOrder((), (), pinned=False) if without is None else without
        return order.with_rows(self.table.mode, joined((*measured, (None, base))))

    def __reduce__(self) -> tuple[Any, ...]:
        ops = {op: dataclasses.replace(t, figures=()) for op, t in self.table.ops.items()}
        return Pinned, (self.file, self.digest, dataclasses.replace(self.table, ops=ops))


def _tokens_of(row: Row, base: tuple[Token, ...]) -> tuple[Token, ...]:
    if row.impl == DEFAULT:
        return base
    if row.impl == STOCK:
        return (Token("stock"),)
    first = Token("impl", row.impl)
    return (first, *(token for token in base if token != first))


def read_table(path: str, *, key: str = "table", origin: str = "") -> Table:
    """Read a table's file.

    Args:
        path: the file.
        key: the setting that names it, for errors.
        origin: where the setting stands, for the error of a file that cannot be read.

    Raises:
        SettingsError: it cannot be read, is no table, is only half of one, or was changed after it
            was written.
    """
    data = read_json(path, key, origin, most=MAX_BYTES, what="table", anew=ANEW)
    if not isinstance(data, dict) or data.get("vllm_fl_table") != VERSION:
        found = data.get("vllm_fl_table") if isinstance(data, dict) else None
        problem = f"is no table of version {VERSION}"
        raise wrong(key, path, problem + (f"; it says {found!r}" if found is not None else ""))
    told = {name: data[name] for name in data if name not in ("vllm_fl_table", "digest")}
    try:
        table = _table_of(told)
        for op, tuned in table.ops.items():
            for figure in tuned.figures:
                if figure.tokens < 1:
                    problem = f"{figure.impl} was measured at {figure.tokens} tokens"
                    raise wrong(key, path, f"ops.{op}.figures: {problem}")
    except (AttributeError, KeyError, TypeError) as error:
        lacks = f"{error} is missing" if isinstance(error, KeyError) else error
        problem = f"is no whole table: {lacks}. {ANEW}"
        raise wrong(key, path, problem) from error
    if data.get("digest") != table.seal:
        raise wrong(
            key,
            path,
            "was changed after it was written: its digest does not fit. A choice of your own "
            "belongs into op_backends, whose lists win over a table's rows",
        )
    return table


def _table_of(told: Mapping[str, Any]) -> Table:
    """The table of a file's content. What its values are, its seal says.

    Raises:
        AttributeError, KeyError, TypeError: the content has other parts than a table.
    """
    ops = {}
    for op, tuned in told["ops"].items():
        rows = tuple(Row(**row) for row in tuned["rows"])
        figures = tuple(Figure(**figure) for figure in tuned["figures"])
        ops[op] = TunedOp(**{**tuned, "rows": rows, "figures": figures})
    accepted = told.get("accepted")
    verdict = None if accepted is None else Verdict(**accepted)
    return Table(**{**told, "ops": ops, "accepted": verdict})
