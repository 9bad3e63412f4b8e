"""What decides between implementations: tokens, orders and the policy that holds them.

Values only. Where they come from is `loading`; what they lead to is `resolver`.
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

DEFAULT = "default"
"""Stands for the ops that no list names, where orders are written."""

GROUP = "group:"
"""What the name of a group of ops begins with there: `group:norms`."""

PREFERENCES = (*KINDS, "stock")
"""What may be preferred: a kind, or to leave everything as it is."""

DEFAULT_ORDERS: Mapping[str, tuple[str, ...]] = {
    "flagos": ("flagos", "vendor", "reference"),
    "vendor": ("vendor", "flagos", "reference"),
    "reference": ("reference", "flagos", "vendor"),
    "stock": ("flagos", "vendor", "reference"),
}
"""The order of an op that no list names, by preference."""

ENGINE_ORDERS: Mapping[str, tuple[str, ...]] = {
    "flagos": ("flagos", "vendor", "stock", "reference"),
    "vendor": ("vendor", "flagos", "stock", "reference"),
    "reference": ("reference", "flagos", "vendor"),
    "stock": UNTOUCHED,
}
"""The same inside an engine: vLLM's own kernels are not given away to plain PyTorch."""


@dataclass(frozen=True)
class Token:
    """One entry of an order: `flagos`, `reference`, `vendor`, `vendor:NAME`, `impl:ID`, `foreign`,
    `stock`."""

    kind: Literal["flagos", "vendor", "reference", "impl", "foreign", "stock"]
    name: str | None = None

    @classmethod
    def parse(cls, text: str) -> Token:
        """Read one token. Raises ValueError that says what was likely meant."""
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
        raise ValueError(
            f"{text!r} is not a valid token; use flagos, reference, vendor, vendor:NAME, impl:ID, "
            f"foreign or stock.{closest(text.strip(), (*KINDS, *UNTOUCHED))}"
        )

    def __str__(self) -> str:
        return self.kind if self.name is None else f"{self.kind}:{self.name}"

    def matches(self, impl: Impl) -> bool:
        """Whether `impl` stands under this token."""
        if self.kind == "impl":
            return impl.impl_id == self.name
        if self.kind != impl.kind.value:
            return False
        return self.name is None or self.name in impl.vendors

    @property
    def preference(self) -> str | None:
        """The kind of what it selects, for re-sorting; an impl id tells it by its first part."""
        if self.kind == "impl" and self.name is not None:
            return {"default": "flagos"}.get(head := self.name.split(".")[0], head)
        return "stock" if self.kind in UNTOUCHED else self.kind


MAX_ROWS = 256
"""The same of rows by size: vLLM captures graphs of some fifty sizes."""

REST = "rest"
"""The key of the row for calls of more tokens than every ceiling."""

Rows = tuple[tuple[int | None, T], ...]
"""Values by the size of a call: (ceiling, the value for calls of at most so many tokens).

Ceilings ascend. The last one is None: its value is that of all larger calls. Where size does not
matter, there is that row alone.
"""


def at_size(rows: Rows[T], tokens: int | None) -> T:
    """The value for a call of so many tokens; None is more than every ceiling."""
    size = math.inf if tokens is None else tokens
    return next(value for ceiling, value in rows if ceiling is None or size <= ceiling)


def joined(rows: Rows[T], alike: Callable[[T, T], bool] = operator.eq) -> Rows[T]:
    """The rows without those whose next larger calls have the same."""
    found = (row for row, following in pairwise(rows) if not alike(row[1], following[1]))
    return (*found, *rows[-1:])


@dataclass(frozen=True)
class OpOrder:
    """The listed tokens of one op: only these are tried, in this order.

    Args:
        eager, compiled: the tokens of each mode, by the size of a call; empty where the list leaves
            the mode open.
        pinned: written by the user, so that no `prefer` re-sorts it.
        group: the group by which it was written (`norms`); empty where the op itself was named.

    Raises:
        ValueError: ceilings that are no integers, below 1 or not ascending, rows without one for
            all larger calls, or a row without tokens.
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
        """The tokens of one mode by the size of a call; empty where the list leaves it open."""
        return self.eager if mode == "eager" else self.compiled

    def with_rows(self, mode: Mode, rows: Rows[tuple[Token, ...]]) -> OpOrder:
        """This order with other rows in one mode."""
        eager, compiled = (rows, self.compiled) if mode == "eager" else (self.eager, rows)
        return dataclasses.replace(self, eager=eager, compiled=compiled)

    @property
    def every(self) -> tuple[Token, ...]:
        """Every token of the list, once, whatever its mode and row."""
        rows = (*self.eager, *self.compiled)
        return tuple(dict.fromkeys(token for _, tokens in rows for token in tokens))

    @classmethod
    def of(cls, value: object, *, pinned: bool = True) -> OpOrder:
        """From what settings hold: a token, a list of tokens, `{"<=16": …, "rest": …}` with such
        lists by the token count of a call, or any of these for each mode as `{eager: …,
        compiled: …}`.

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
        """This order, each row of it, with the preferred kind first, otherwise as it stands.

        Nothing is added but `stock`, where that is preferred: a list without it has it at its end.
        """

        def front(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
            stock = Token("stock")
            implied = kind == "stock" and stock not in tokens
            all_of_them = (*tokens, stock) if implied else tokens
            return tuple(sorted(all_of_them, key=lambda token: token.preference != kind))

        return self if self.pinned else self._with_rows(front)

    @property
    def above_plain(self) -> OpOrder:
        """This order with `stock` before plain PyTorch that is there to stand in for another kind.

        `reference` at the head of a row is somebody's choice, and stays. A script skips `stock`,
        so that for it the order is the same.
        """

        def raised(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
            stock, plain = Token("stock"), [token.preference == "reference" for token in tokens]
            head = plain.index(False) if False in plain else len(plain)
            if True not in plain[head:]:
                return tokens
            place = plain.index(True, head)
            if stock in tokens[:place]:
                return tokens
            rest = (token for token in tokens[place:] if token != stock)
            return (*tokens[:place], stock, *rest)

        return self._with_rows(raised)

    def _with_rows(self, change: Callable[[tuple[Token, ...]], tuple[Token, ...]]) -> OpOrder:
        eager, compiled = (
            tuple((ceiling, change(tokens)) for ceiling, tokens in rows)
            for rows in (self.eager, self.compiled)
        )
        return dataclasses.replace(self, eager=eager, compiled=compiled)

    @property
    def written(self) -> Any:
        """The whole order as `of` reads it, in JSON-able data: of both modes at once if they are
        alike, and without a mode that is left open."""
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
    if len(value) > MAX_ROWS:
        raise ValueError(f"an order by size has at most {MAX_ROWS} rows")
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
    """What decides between implementations. Frozen, hashable, printable.

    Args:
        prefer: the kind tried first where no list names the op: a preference, not an exclusion; or
            `stock`, which leaves such an op as it is.
        strict: the first failure is raised and nothing else is tried.
        per_op_order: op -> OpOrder, or what `OpOrder.of` reads; or pairs of the two. That of
            `default` is for the ops that no list names.
        deny_vendors: the vendors that may not be used; deny beats allow.
        allow_vendors: the vendors that may; None allows all. Both look at kind VENDOR only.

    Raises:
        ValueError: an unknown kind or token, or a group in the place of an op.
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
        """Whether the user has written a list for the op; for it alone, where `itself` is asked."""
        order = self.per_op_order.get(op)
        return order is not None and order.pinned and not (itself and order.group)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        # Built anew where it arrives: another process hashes text differently.
        lists = (dict(self.per_op_order), self.deny_vendors, self.allow_vendors)
        return (SelectionPolicy, (self.prefer, self.strict, *lists))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]

    def listed(self, op: str, mode: Mode = "eager") -> OpOrder | None:
        """The list that orders `op` in this mode, or None where the preference alone does."""
        lists = (self.per_op_order.get(name) for name in (op, DEFAULT))
        return next((order for order in lists if order is not None and order.rows(mode)), None)

    def ceilings(self, op: str, mode: Mode = "eager") -> tuple[int, ...]:
        """The token counts up to which calls of `op` have an order of their own, ascending."""
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
        """The tokens tried for `op`, in order; inside an engine the default names `stock`.

        Args:
            op: the op's name.
            mode: the engine's mode.
            engine: whether it is for an engine.
            tokens: how many tokens the call has, where the order differs by size; None is more
                than every ceiling.
        """
        listed = self.listed(op, mode)
        if listed is not None:
            return at_size(listed.rows(mode), tokens)
        defaults = ENGINE_ORDERS if engine else DEFAULT_ORDERS
        return tuple(Token.parse(kind) for kind in defaults[self.prefer])

    def preferring(self, kind: str) -> SelectionPolicy:
        """This policy with another preference, as a higher layer than its lists sets it."""
        policy = dataclasses.replace(self, prefer=kind)
        orders = {op: order.preferring(kind) for op, order in self.per_op_order.items()}
        return dataclasses.replace(policy, per_op_order=orders)

    def refuses(self, impl: Impl) -> str | None:
        """The vendor filter that keeps `impl` out, or None."""
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
