"""Tokens, orders, and the policy that chooses between implementations.

`loading` makes them of settings, and `dispatch/resolver.py` applies them.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args

from ..plugins.types import BackendImplKind, Impl
from ..text import closest, kind_of

T = TypeVar("T")

Mode = Literal["eager", "compiled"]
"""How the engine runs a model. Calls from a script are eager."""

MODES: tuple[Mode, ...] = get_args(Mode)

KINDS = tuple(kind.value for kind in BackendImplKind)
"""The kinds as settings spell them: flagos, vendor, reference."""

UNTOUCHED = ("foreign", "stock")
"""The tokens by which an engine is left as it is: another plugin's layers, and vLLM's own code."""

SLIPS = {"vllm": "stock", "native": "stock", "torch": "reference", "flaggems": "flagos"}
"""Words that are likely meant as a token -> the token."""

DEFAULT = "default"
"""The name, in orders, of all ops without an order of their own."""

GROUP = "group:"
"""The prefix, in orders, of a group of ops: `group:norms`."""

PREFERENCES = (*KINDS, "stock")
"""The values of `prefer`: a kind, or to leave everything to vLLM."""

DEFAULT_ORDERS: Mapping[str, tuple[str, ...]] = {
    "flagos": ("flagos", "vendor", "reference"),
    "vendor": ("vendor", "flagos", "reference"),
    "reference": ("reference", "flagos", "vendor"),
    "stock": ("flagos", "vendor", "reference"),
}
"""Preference -> the order of an op without an order of its own."""

ENGINE_ORDERS: Mapping[str, tuple[str, ...]] = {
    "flagos": ("flagos", "vendor", "stock", "reference"),
    "vendor": ("vendor", "flagos", "stock", "reference"),
    "reference": ("reference", "flagos", "vendor"),
    "stock": UNTOUCHED,
}
"""The same inside an engine: vLLM's implementation comes before the reference backend."""


@dataclass(frozen=True)
class Token:
    """One entry of an order: `flagos`, `reference`, `vendor`, `vendor:NAME`, `impl:ID`, `foreign`,
    `stock`."""

    kind: Literal["flagos", "vendor", "reference", "impl", "foreign", "stock"]
    name: str | None = None

    @classmethod
    def parse(cls, text: str) -> Token:
        """Read one token. Raises ValueError, with a suggestion."""
        if not isinstance(text, str):
            told = "a mapping (vendor:NAME has no space after its colon)"
            found = told if isinstance(text, Mapping) else kind_of(text)
            raise ValueError(f"expected a token such as 'vendor:cuda', got {found}")
        head, colon, name = text.strip().partition(":")
        first, dot, rest = head.partition(".")
        if dot and rest and not colon and first in ("default", "vendor", "reference"):
            head, colon, name = "impl", ":", head  # an id, as logs have it
        if head in (*KINDS, *UNTOUCHED) and not colon:
            return cls(head)  # type: ignore[arg-type]
        is_name = name.isprintable() and not any(map(str.isspace, name))
        if head in ("vendor", "impl") and name and is_name:
            return cls(head, name)  # type: ignore[arg-type]
        meant = SLIPS.get(head.lower(), "")
        hint = f" Did you mean {meant!r}?" if meant else closest(head, (*KINDS, *UNTOUCHED))
        hint = hint or (f" A vendor is vendor:{head}." if head.isidentifier() else "")
        raise ValueError(
            f"{text!r} is not a valid token; use flagos, reference, vendor, vendor:NAME, impl:ID, "
            f"foreign or stock.{hint}"
        )

    def __str__(self) -> str:
        return self.kind if self.name is None else f"{self.kind}:{self.name}"

    def matches(self, impl: Impl) -> bool:
        """Return whether the token selects `impl`."""
        if self.kind == "impl":
            return impl.impl_id == self.name
        if self.kind != impl.kind.value:
            return False
        return self.name is None or self.name in impl.vendors

    @property
    def preference(self) -> str | None:
        """The kind of the implementations that it selects; of an id, by its first part."""
        if self.kind == "impl" and self.name is not None:
            return {"default": "flagos"}.get(head := self.name.split(".")[0], head)
        return "stock" if self.kind in UNTOUCHED else self.kind


REST = "rest"
"""The key of the row for calls of more tokens than every ceiling."""

Rows = tuple[tuple[int | None, T], ...]
"""Values by the size of a call: (ceiling, the value for calls of at most that many tokens).

Ceilings ascend. The last one is None: its value is for all larger calls. If size does not matter,
it is the only row.
"""


def at_size(rows: Rows[T], tokens: int | None) -> T:
    """Return the value for a call of this many tokens; None is more than every ceiling."""
    size = math.inf if tokens is None else tokens
    return next(value for ceiling, value in rows if ceiling is None or size <= ceiling)


def joined(rows: Rows[T], alike: Callable[[T, T], bool] = operator.eq) -> Rows[T]:
    """Return the rows without those that have the value of the next row."""
    found = (row for row, following in pairwise(rows) if not alike(row[1], following[1]))
    return (*found, *rows[-1:])


@dataclass(frozen=True)
class OpOrder:
    """The listed tokens of one op: only these are tried, in this order.

    Args:
        eager, compiled: the tokens of each mode, by the size of a call; empty if the mode is open.
        pinned: whether the user wrote it; `prefer` does not re-sort it then.
        group: the group in which the op was ordered (`norms`); empty if the op itself was.

    Raises:
        ValueError: ceilings that are not ascending integers above 0, no row for all larger calls,
            or a row without tokens.
    """

    eager: Rows[tuple[Token, ...]]
    compiled: Rows[tuple[Token, ...]]
    pinned: bool = True
    group: str = ""

    def __post_init__(self) -> None:
        for rows in filter(None, (self.eager, self.compiled)):
            if rows[-1][0] is not None:
                raise ValueError(f"orders by size need {REST!r}: the order of every larger call")
            ceilings = [ceiling for ceiling, _ in rows[:-1]]
            if not all(type(n) is int and n > 0 for n in ceilings):
                raise ValueError(f"a ceiling is an integer of at least 1, got {ceilings}")
            for before, ceiling in pairwise(ceilings):
                if ceiling <= before:  # type: ignore[operator]
                    problem = f"'<={ceiling}' follows '<={before}'"
                    raise ValueError(f"{problem}; write the ceilings in ascending order")
            for ceiling, tokens in rows:
                if not tokens:
                    raise ValueError(f"the order of {_row_key(ceiling)} is empty")

    def rows(self, mode: Mode) -> Rows[tuple[Token, ...]]:
        """Return the tokens of one mode by the size of a call; empty if the mode is open."""
        return self.eager if mode == "eager" else self.compiled

    @property
    def every(self) -> tuple[Token, ...]:
        """The tokens of all modes and rows, each once."""
        rows = (*self.eager, *self.compiled)
        return tuple(dict.fromkeys(token for _, tokens in rows for token in tokens))

    @classmethod
    def of(cls, value: object, *, pinned: bool = True) -> OpOrder:
        """Read an order: a token, a list of tokens, such lists by the token count of a call as
        `{"<=16": …, "rest": …}`, or any of these for each mode as `{eager: …, compiled: …}`.

        Raises:
            ValueError: an unknown token or mode, an empty list, wrong rows, or another type.
        """
        if isinstance(value, OpOrder):
            return value
        if isinstance(value, Mapping) and not _is_by_size(value):
            unknown = [str(mode) for mode in value if mode not in MODES]
            if unknown or not value:
                raise ValueError(
                    "expected the keys eager and compiled, or '<=N' and rest for orders by size, "
                    f"got {', '.join(unknown) or 'none'}."
                    + (closest(unknown[0], MODES) if unknown else "")
                )
            sides = {mode: _side(side) for mode, side in value.items()}
        else:
            sides = dict.fromkeys(MODES, _side(value))
        return cls(sides.get("eager", ()), sides.get("compiled", ()), pinned)

    def preferring(self, kind: str) -> OpOrder:
        """Return this order with the preferred kind first in each row, unless it is pinned.

        Nothing is added, except `stock` if that is preferred.
        """

        def front(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
            stock = Token("stock")
            implied = kind == "stock" and stock not in tokens
            all_of_them = (*tokens, stock) if implied else tokens
            return tuple(sorted(all_of_them, key=lambda token: token.preference != kind))

        return self if self.pinned else self._with_rows(front)

    @property
    def above_plain(self) -> OpOrder:
        """This order with `stock` before a reference backend that follows another kind.

        `reference` at the head of a row stays there. Scripts skip `stock`.
        """

        def raised(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
            plain = [token.preference == "reference" for token in tokens]
            at = next((n for n in range(len(tokens)) if plain[n] and False in plain[:n]), None)
            stock = Token("stock")
            if at is None or stock in tokens[:at]:
                return tokens
            return (*tokens[:at], stock, *(token for token in tokens[at:] if token != stock))

        return self._with_rows(raised)

    def _with_rows(self, change: Callable[[tuple[Token, ...]], tuple[Token, ...]]) -> OpOrder:
        eager, compiled = (
            tuple((ceiling, change(tokens)) for ceiling, tokens in rows)
            for rows in (self.eager, self.compiled)
        )
        return dataclasses.replace(self, eager=eager, compiled=compiled)

    @property
    def written(self) -> Any:
        """The order as `of` reads it, in JSON-able data: both modes at once if they are alike, and
        without an open mode."""
        sides: dict[str, Any] = {}
        for mode in filter(self.rows, MODES):
            rows = {_row_key(ceiling): [*map(str, tokens)] for ceiling, tokens in self.rows(mode)}
            sides[mode] = rows if len(rows) > 1 else rows[REST]
        return sides["eager"] if self.eager == self.compiled and sides else sides

    def __str__(self) -> str:
        if self.eager == self.compiled:
            return _text(self.eager)
        return f"eager {_text(self.eager)}, compiled {_text(self.compiled)}"


def _text(rows: Rows[tuple[Token, ...]]) -> str:
    each = [(_row_key(ceiling), "|".join(map(str, tokens))) for ceiling, tokens in rows]
    if len(each) == 1:
        return each[0][1]
    return ", ".join(map(" ".join, each)) or "(default order)"


def _row_key(ceiling: int | None) -> str:
    """The key of a row: `<=16`, or `rest`."""
    return REST if ceiling is None else f"<={ceiling}"


def _is_by_size(value: Mapping[Any, object]) -> bool:
    return any(str(key) == REST or str(key).startswith("<") for key in value)


def _ceiling(key: object) -> int | None:
    """The ceiling of a row: 16 of `<=16`, None of `rest`. Raises ValueError."""
    if key == REST:
        return None
    found = re.fullmatch(r"<=\s*([1-9][0-9]{0,8})", str(key).strip())
    if found is None:
        raise ValueError(
            f"{str(key)!r} is not a row of an order by size; expected '<=N' with an integer N of "
            f"at least 1, or {REST}"
        )
    return int(found[1])


def _side(value: object) -> Rows[tuple[Token, ...]]:
    """The rows of one mode."""
    if not isinstance(value, Mapping):
        return ((None, _tokens(value)),)
    rows = [(_ceiling(key), _tokens(tokens)) for key, tokens in value.items()]
    return tuple(sorted(rows, key=lambda row: row[0] is None))


def _tokens(value: object) -> tuple[Token, ...]:
    if isinstance(value, str):
        value = value.split("|")
    if not isinstance(value, Sequence) or not value:
        raise ValueError(f"expected a token or a non-empty list of tokens, got {kind_of(value)}")
    tokens = tuple(item if isinstance(item, Token) else Token.parse(item) for item in value)
    if len(set(tokens)) != len(tokens):
        raise ValueError(f"a token is listed twice in [{', '.join(map(str, tokens))}]")
    return tokens


@dataclass(frozen=True)
class SelectionPolicy:
    """The choice between implementations. Frozen, hashable, printable.

    Args:
        prefer: the kind that is tried first for ops without an order; others are tried after it.
            `stock` leaves such an op to vLLM.
        strict: the first failure is raised and nothing else is tried.
        per_op_order: op -> OpOrder, or a value that `OpOrder.of` reads; or pairs of the two. The
            order of `default` is for ops without an order.
        deny_vendors: the vendors that may not be used; it overrides `allow_vendors`.
        allow_vendors: the vendors that may be used; None allows all. Both are for kind VENDOR only.

    Raises:
        ValueError: an unknown kind or token, or a group instead of an op.
    """

    prefer: str = "flagos"
    strict: bool = False
    per_op_order: Mapping[str, OpOrder] = field(default_factory=dict)
    deny_vendors: frozenset[str] = frozenset()
    allow_vendors: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if self.prefer not in PREFERENCES:
            raise ValueError(
                f"prefer is one of {', '.join(PREFERENCES)}, got {self.prefer!r}."
                + closest(str(self.prefer), PREFERENCES)
            )
        orders = {op: OpOrder.of(order) for op, order in sorted(dict(self.per_op_order).items())}
        if named := [name for name in orders if name.startswith(GROUP)]:
            raise ValueError(
                f"a policy orders ops by their names, and {named[0]!r} is none: only settings know "
                "which ops a group has"
            )
        object.__setattr__(self, "per_op_order", MappingProxyType(orders))
        object.__setattr__(self, "strict", bool(self.strict))
        if self.allow_vendors is not None:
            object.__setattr__(self, "allow_vendors", _names("allow_vendors", self.allow_vendors))
        object.__setattr__(self, "deny_vendors", _names("deny_vendors", self.deny_vendors))
        # A policy is a key of the call path's table: hash it once, not at every call.
        fields = (self.prefer, self.strict, tuple(orders.items()))
        object.__setattr__(self, "_hash", hash((fields, self.allow_vendors, self.deny_vendors)))

    def names(self, op: str, *, itself: bool = False) -> bool:
        """Return whether the user has ordered the op; with `itself`, not only its group."""
        order = self.per_op_order.get(op)
        return order is not None and order.pinned and not (itself and order.group)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        # It is rebuilt in the other process, which hashes text differently.
        lists = (dict(self.per_op_order), self.deny_vendors, self.allow_vendors)
        return (SelectionPolicy, (self.prefer, self.strict, *lists))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]

    def listed(self, op: str, mode: Mode = "eager") -> OpOrder | None:
        """Return the order of `op` in this mode, or None if only the preference orders it."""
        lists = (self.per_op_order.get(name) for name in (op, DEFAULT))
        return next((order for order in lists if order is not None and order.rows(mode)), None)

    def ceilings(self, op: str, mode: Mode = "eager") -> tuple[int, ...]:
        """Return the ceilings of the order of `op`, ascending."""
        listed = self.listed(op, mode)
        return tuple(n for n, _ in listed.rows(mode) if n is not None) if listed else ()

    def order(
        self,
        op: str,
        mode: Mode = "eager",
        *,
        engine: bool = False,
        tokens: int | None = None,
    ) -> tuple[Token, ...]:
        """Return the tokens that are tried for `op`, in order.

        Args:
            op: the op's name.
            mode: the engine's mode.
            engine: whether it is for an engine, whose default order has `stock`.
            tokens: the number of tokens of the call; None is more than every ceiling.
        """
        listed = self.listed(op, mode)
        if listed is not None:
            return at_size(listed.rows(mode), tokens)
        defaults = ENGINE_ORDERS if engine else DEFAULT_ORDERS
        return tuple(Token.parse(kind) for kind in defaults[self.prefer])

    def preferring(self, kind: str) -> SelectionPolicy:
        """Return this policy with another preference, which re-sorts orders that are not pinned."""
        policy = dataclasses.replace(self, prefer=kind)
        orders = {op: order.preferring(kind) for op, order in self.per_op_order.items()}
        return dataclasses.replace(policy, per_op_order=orders)

    def refuses(self, impl: Impl) -> str | None:
        """Return the vendor filter that excludes `impl`, or None."""
        if impl.kind is not BackendImplKind.VENDOR:
            return None
        if impl.vendors & self.deny_vendors:
            return f"deny_vendors names {impl.vendor}"
        if self.allow_vendors is not None and not impl.vendors & self.allow_vendors:
            allowed = ", ".join(sorted(self.allow_vendors)) or "none"
            return f"allow_vendors lists {allowed}"
        return None


def _names(what: str, value: Iterable[str]) -> frozenset[str]:
    if isinstance(value, str):
        raise ValueError(f"{what} is a set of vendor names, got the text {value!r}")
    return frozenset(value)
