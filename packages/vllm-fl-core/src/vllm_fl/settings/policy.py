"""Selectors, orders, and the policy that chooses between implementations.

`loading` creates them from settings; `dispatch/resolver.py` applies them.
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

from ..plugins.types import VLLM_IDS, BackendImplKind, Impl
from ..text import closest, kind_of

T = TypeVar("T")

Mode = Literal["eager", "compiled"]
"""How the engine runs a model. Calls from scripts are eager."""

MODES: tuple[Mode, ...] = get_args(Mode)

IMPL_KINDS = tuple(kind.value for kind in BackendImplKind)

UNTOUCHED = ("foreign", "stock")
"""Selectors for code that vllm-fl does not replace: layers of a different plugin, and vLLM's
implementation."""

SLIPS = {"vllm": "stock", "native": "stock", "torch": "reference", "flaggems": "flagos"}
"""Likely mistake -> the intended selector."""

DEFAULT_ORDER = "default"
"""The key of the order for ops without their own order."""

GROUP_PREFIX = "group:"

PREFERENCES = (*IMPL_KINDS, "stock")

DEFAULT_ORDERS: Mapping[str, tuple[str, ...]] = {
    "flagos": ("flagos", "vendor", "reference"),
    "vendor": ("vendor", "flagos", "reference"),
    "reference": ("reference", "flagos", "vendor"),
    "stock": ("flagos", "vendor", "reference"),
}
"""Preference -> default order of an op in a script."""

ENGINE_ORDERS: Mapping[str, tuple[str, ...]] = {
    "flagos": ("flagos", "vendor", "stock", "reference"),
    "vendor": ("vendor", "flagos", "stock", "reference"),
    "reference": ("reference", "flagos", "vendor"),
    "stock": UNTOUCHED,
}
"""Preference -> default order in an engine. `stock` precedes `reference` unless `reference` is
preferred."""


@dataclass(frozen=True)
class Selector:
    """A selector: `flagos`, `reference`, `vendor`, `vendor:NAME`, `impl:ID`, `foreign` or
    `stock`."""

    kind: Literal["flagos", "vendor", "reference", "impl", "foreign", "stock"]
    name: str | None = None

    @classmethod
    def parse(cls, text: str) -> Selector:
        """Parse a selector. The ValueError for an invalid selector contains a suggestion."""
        if not isinstance(text, str):
            mapping = "a mapping (vendor:NAME has no space after its colon)"
            found = mapping if isinstance(text, Mapping) else kind_of(text)
            raise ValueError(f"expected a selector such as 'vendor:cuda', got {found}")
        head, colon, name = text.strip().partition(":")
        first, dot, rest = head.partition(".")
        if dot and rest and not colon and first in ("default", "vllm", *IMPL_KINDS):
            head, colon, name = "impl", ":", head  # an id as logs print it
        if head in (*IMPL_KINDS, *UNTOUCHED) and not colon:
            return cls(head)  # type: ignore[arg-type]
        is_name = name.isprintable() and not any(map(str.isspace, name))
        if head in ("vendor", "impl") and name and is_name:
            return cls(head, name)  # type: ignore[arg-type]
        meant = SLIPS.get(head.lower(), "")
        hint = f" Did you mean {meant!r}?" if meant else closest(head, (*IMPL_KINDS, *UNTOUCHED))
        hint = hint or (f" A vendor is vendor:{head}." if head.isidentifier() else "")
        raise ValueError(
            f"{text!r} is not a valid selector; use flagos, reference, vendor, vendor:NAME, "
            f"impl:ID, foreign or stock.{hint}"
        )

    def __str__(self) -> str:
        return self.kind if self.name is None else f"{self.kind}:{self.name}"

    def matches(self, impl: Impl) -> bool:
        if self.kind == "impl" or impl.impl_id.startswith(VLLM_IDS):
            return impl.impl_id == self.name
        if self.kind != impl.kind.value:
            return False
        return self.name is None or self.name in impl.vendors

    @property
    def is_vllms(self) -> bool:
        """Whether it selects one of vLLM's own classes for quantised layers, by id."""
        return self.kind == "impl" and str(self.name).startswith(VLLM_IDS)

    @property
    def preference(self) -> str | None:
        """The kind of the selected implementations. For an id, its first part determines
        the kind."""
        if self.kind == "impl" and self.name is not None:
            return {"default": "flagos"}.get(head := self.name.split(".")[0], head)
        return "stock" if self.kind in UNTOUCHED else self.kind


REST = "rest"
"""The key of the row for calls that are larger than all other rows."""

Rows = tuple[tuple[int | None, T], ...]
"""Values by call size: (maximum tokens, the value for calls of at most that many tokens), sorted.
The last maximum is None, for all larger calls."""


def at_size(rows: Rows[T], tokens: int | None) -> T:
    """Return the value for a call of this many tokens. If `tokens` is None, the last row is
    used."""
    size = math.inf if tokens is None else tokens
    return next(value for ceiling, value in rows if ceiling is None or size <= ceiling)


def joined(rows: Rows[T], alike: Callable[[T, T], bool] = operator.eq) -> Rows[T]:
    """Merge each row into the next one if their values are equal."""
    found = (row for row, following in pairwise(rows) if not alike(row[1], following[1]))
    return (*found, *rows[-1:])


@dataclass(frozen=True)
class OpOrder:
    """The selectors of one op; only these are tried, in this order.

    Args:
        eager, compiled: the selectors of each mode, by the size of a call; empty if the mode is
            open (lower-priority orders then apply).
        pinned: whether the user wrote the order. If so, `prefer` does not re-sort it.
        group: the group of the order (`norms`); empty for an order of the op itself.

    Raises:
        ValueError: the maximums are not ascending positive integers, the row for all larger calls
            is missing, or a row has no selectors.
    """

    eager: Rows[tuple[Selector, ...]]
    compiled: Rows[tuple[Selector, ...]]
    pinned: bool = True
    group: str = ""

    def __post_init__(self) -> None:
        for rows in filter(None, (self.eager, self.compiled)):
            if rows[-1][0] is not None:
                raise ValueError(f"an order by size needs {REST!r}, the order for all larger calls")
            ceilings = [ceiling for ceiling, _ in rows[:-1]]
            if not all(type(n) is int and n > 0 for n in ceilings):
                raise ValueError(f"a maximum must be an integer of at least 1, got {ceilings}")
            for before, ceiling in pairwise(ceilings):
                if ceiling <= before:  # type: ignore[operator]
                    problem = f"'<={ceiling}' follows '<={before}'"
                    raise ValueError(f"{problem}; write the maximums in ascending order")
            for ceiling, selectors in rows:
                if not selectors:
                    raise ValueError(f"the order for {_row_key(ceiling)} is empty")

    def rows(self, mode: Mode) -> Rows[tuple[Selector, ...]]:
        return self.eager if mode == "eager" else self.compiled

    @property
    def every(self) -> tuple[Selector, ...]:
        rows = (*self.eager, *self.compiled)
        return tuple(dict.fromkeys(selector for _, selectors in rows for selector in selectors))

    @classmethod
    def of(cls, value: object, *, pinned: bool = True) -> OpOrder:
        """Read an order from settings: a selector, a list of selectors, lists by the number of
        tokens of a call (`{"<=16": …, "rest": …}`), or an order for each mode (`{eager: …,
        compiled: …}`). Raises ValueError if a selector or mode is unknown, a list is empty, or rows
        or types are invalid."""
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
        """Return this order with the preferred kind first in each row, unless it is pinned. If
        `stock` is preferred, it is added to rows without it."""

        def front(selectors: tuple[Selector, ...]) -> tuple[Selector, ...]:
            stock = Selector("stock")
            implied = kind == "stock" and stock not in selectors
            all_of_them = (*selectors, stock) if implied else selectors
            return tuple(sorted(all_of_them, key=lambda selector: selector.preference != kind))

        return self if self.pinned else self._with_rows(front)

    @property
    def above_plain(self) -> OpOrder:
        """This order with `stock` before a `reference` that follows another kind. A leading
        `reference` keeps its position. Scripts ignore `stock`."""

        def raised(selectors: tuple[Selector, ...]) -> tuple[Selector, ...]:
            plain = [selector.preference == "reference" for selector in selectors]
            at = next((n for n in range(len(selectors)) if plain[n] and False in plain[:n]), None)
            stock = Selector("stock")
            if at is None or stock in selectors[:at]:
                return selectors
            return (*selectors[:at], stock, *(each for each in selectors[at:] if each != stock))

        return self._with_rows(raised)

    def _with_rows(self, change: Callable[[tuple[Selector, ...]], tuple[Selector, ...]]) -> OpOrder:
        eager, compiled = (
            tuple((ceiling, change(selectors)) for ceiling, selectors in rows)
            for rows in (self.eager, self.compiled)
        )
        return dataclasses.replace(self, eager=eager, compiled=compiled)

    @property
    def written(self) -> Any:
        """The order as JSON-able values that `of` reads. Open modes are omitted; equal modes have
        one value."""
        sides: dict[str, Any] = {}
        for mode in filter(self.rows, MODES):
            rows = {_row_key(ceiling): [*map(str, row)] for ceiling, row in self.rows(mode)}
            sides[mode] = rows if len(rows) > 1 else rows[REST]
        return sides["eager"] if self.eager == self.compiled and sides else sides

    def __str__(self) -> str:
        if self.eager == self.compiled:
            return _text(self.eager)
        return f"eager {_text(self.eager)}, compiled {_text(self.compiled)}"


def _text(rows: Rows[tuple[Selector, ...]]) -> str:
    each = [(_row_key(ceiling), "|".join(map(str, selectors))) for ceiling, selectors in rows]
    if len(each) == 1:
        return each[0][1]
    return ", ".join(map(" ".join, each)) or "(default order)"


def _row_key(ceiling: int | None) -> str:
    return REST if ceiling is None else f"<={ceiling}"


def _is_by_size(value: Mapping[Any, object]) -> bool:
    return any(str(key) == REST or str(key).startswith("<") for key in value)


def _ceiling(key: object) -> int | None:
    if key == REST:
        return None
    found = re.fullmatch(r"<=\s*([1-9][0-9]{0,8})", str(key).strip())
    if found is None:
        raise ValueError(
            f"{str(key)!r} is not a row of an order by size; expected '<=N' with an integer N of "
            f"at least 1, or {REST}"
        )
    return int(found[1])


def _side(value: object) -> Rows[tuple[Selector, ...]]:
    if not isinstance(value, Mapping) or not value:
        return ((None, _selectors(value)),)
    rows = [(_ceiling(key), _selectors(selectors)) for key, selectors in value.items()]
    return tuple(sorted(rows, key=lambda row: row[0] is None))


def _selectors(value: object) -> tuple[Selector, ...]:
    if isinstance(value, str):
        value = value.split("|")
    if not isinstance(value, Sequence) or not value:
        raise ValueError(f"expected a selector or a non-empty list of them, got {kind_of(value)}")
    selectors = tuple(
        each if isinstance(each, Selector) else Selector.parse(each) for each in value
    )
    if len(set(selectors)) != len(selectors):
        raise ValueError(f"a selector is listed twice in [{', '.join(map(str, selectors))}]")
    return selectors


@dataclass(frozen=True)
class SelectionPolicy:
    """How to choose between implementations. A policy is frozen, hashable and printable.

    Args:
        prefer: the kind that is tried first for ops without an order. If it is `stock`, such an op
            runs vLLM's implementation.
        strict: whether the first failure is raised, and no other implementation is tried.
        per_op_order: op -> OpOrder, or a value that `OpOrder.of` reads; or pairs of op and order.
            The key `default` is for ops without an order.
        deny_vendors: the vendors that must not be used. It overrides `allow_vendors`.
        allow_vendors: the vendors that may be used; None allows all. Both filters apply only to
            kind VENDOR.

    Raises:
        ValueError: an unknown kind or selector, or a group instead of an op.
    """

    prefer: str = "flagos"
    strict: bool = False
    per_op_order: Mapping[str, OpOrder] = field(default_factory=dict)
    deny_vendors: frozenset[str] = frozenset()
    allow_vendors: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if self.prefer not in PREFERENCES:
            raise ValueError(
                f"prefer must be one of {', '.join(PREFERENCES)}, got {self.prefer!r}."
                + closest(str(self.prefer), PREFERENCES)
            )
        orders = {op: OpOrder.of(order) for op, order in sorted(dict(self.per_op_order).items())}
        if named := [name for name in orders if name.startswith(GROUP_PREFIX)]:
            raise ValueError(
                f"a policy needs the names of ops, but {named[0]!r} is a group; only settings can "
                "use groups"
            )
        object.__setattr__(self, "per_op_order", MappingProxyType(orders))
        if self.strict not in (0, 1):
            raise ValueError(f"strict must be True or False, got {self.strict!r}")
        object.__setattr__(self, "strict", bool(self.strict))
        if self.allow_vendors is not None:
            object.__setattr__(self, "allow_vendors", _names("allow_vendors", self.allow_vendors))
        object.__setattr__(self, "deny_vendors", _names("deny_vendors", self.deny_vendors))
        # Hashed once, because a policy is a key of the call path's table.
        fields = (self.prefer, self.strict, tuple(orders.items()))
        object.__setattr__(self, "_hash", hash((fields, self.allow_vendors, self.deny_vendors)))

    def names(self, op: str, *, itself: bool = False) -> bool:
        """Return whether the user has set an order for the op. With `itself`, an order of its group
        is ignored."""
        order = self.per_op_order.get(op)
        return order is not None and order.pinned and not (itself and order.group)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        # Rebuilt, because the other process hashes text differently.
        lists = (dict(self.per_op_order), self.deny_vendors, self.allow_vendors)
        return (SelectionPolicy, (self.prefer, self.strict, *lists))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]

    def listed(self, op: str, mode: Mode = "eager") -> OpOrder | None:
        """Return the order of `op` in this mode; None if only `prefer` applies."""
        lists = (self.per_op_order.get(name) for name in (op, DEFAULT_ORDER))
        return next((order for order in lists if order is not None and order.rows(mode)), None)

    def ceilings(self, op: str, mode: Mode = "eager") -> tuple[int, ...]:
        """Return the maximum tokens of each row for `op` except the last, ascending."""
        listed = self.listed(op, mode)
        return tuple(n for n, _ in listed.rows(mode) if n is not None) if listed else ()

    def order(
        self, op: str, mode: Mode = "eager", *, engine: bool = False, tokens: int | None = None
    ) -> tuple[Selector, ...]:
        """Return the selectors for `op`, in order. The default orders of an `engine` differ from
        those of scripts. `tokens` is the number of tokens of the call; None for the row of the
        largest calls."""
        listed = self.listed(op, mode)
        if listed is not None:
            return at_size(listed.rows(mode), tokens)
        defaults = ENGINE_ORDERS if engine else DEFAULT_ORDERS
        return tuple(Selector.parse(kind) for kind in defaults[self.prefer])

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
            return f"deny_vendors contains {impl.vendor}"
        if self.allow_vendors is not None and not impl.vendors & self.allow_vendors:
            allowed = ", ".join(sorted(self.allow_vendors)) or "none"
            return f"allow_vendors lists {allowed}"
        return None


def _names(what: str, value: Iterable[str]) -> frozenset[str]:
    names = frozenset(value) if isinstance(value, Iterable) else {value}
    if isinstance(value, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{what} must be a set of vendor names, got {value!r}")
    return frozenset(names)
