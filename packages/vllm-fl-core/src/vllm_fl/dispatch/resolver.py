"""Resolving: (what is installed, policy, rejections) -> the candidates in order, with reasons.

One pure function. Log lines, errors, the command line and the engine's plan all render its trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from operator import itemgetter
from typing import Literal, cast

from ..plugins.types import Impl
from ..settings.policy import Mode, SelectionPolicy, Token


@dataclass(frozen=True)
class Stock:
    """What runs without us. Inside an engine it is a candidate, listed or not."""

    impl_id: str = "stock.vllm"
    vendor: None = None
    priority: None = None

    @property
    def token(self) -> str:
        """The token that names it in an order."""
        return self.impl_id.partition(".")[0]


STOCK = Stock()
"""vLLM's own path, left untouched."""

FOREIGN = Stock("foreign.oot")
"""The class by which another plugin of vLLM's has replaced a layer of the op, left untouched."""

UNORDERED = "default, since no list orders the op"
"""Why vLLM's own path has its place in an order that nobody wrote."""


UNAVAILABLE = "not available: "
"""How the reason begins of one that the machine rules out."""


@dataclass(frozen=True)
class Candidate:
    """One implementation and what was decided about it.

    Args:
        impl: the implementation.
        status: `selected`, `eligible` (would be next) or `rejected`.
        reason: why it was rejected; the token of the order that admits it otherwise.
    """

    impl: Impl | Stock
    status: Literal["selected", "eligible", "rejected"]
    reason: str

    @property
    def impl_id(self) -> str:
        """The implementation's id."""
        return self.impl.impl_id


@dataclass(frozen=True)
class Trace:
    """Every candidate of one op: those that may run in their order, then the rejected ones."""

    op: str
    mode: Mode
    order: tuple[Token, ...]
    candidates: tuple[Candidate, ...]

    @property
    def selected(self) -> Impl | Stock | None:
        """The first choice, or None when every candidate was rejected."""
        return next(iter(self.admitted), None)

    @property
    def admitted(self) -> tuple[Impl | Stock, ...]:
        """The implementations that may run, in order."""
        return tuple(c.impl for c in self.candidates if c.status != "rejected")

    @property
    def before_stock(self) -> tuple[Impl, ...]:
        """Those of the admitted that come before what runs without us, in order."""
        before = takewhile(lambda impl: not isinstance(impl, Stock), self.admitted)
        return cast("tuple[Impl, ...]", tuple(before))

    @property
    def rejected(self) -> tuple[tuple[str, str], ...]:
        """(impl id, reason) of those that may not."""
        return tuple((c.impl_id, c.reason) for c in self.candidates if c.status == "rejected")

    @property
    def unavailable(self) -> dict[str, str]:
        """Impl id -> why this machine rules it out."""
        return {
            impl_id: why.removeprefix(UNAVAILABLE)
            for impl_id, why in self.rejected
            if why.startswith(UNAVAILABLE)
        }

    def __str__(self) -> str:
        lines = [f"{self.op} ({self.mode}), order {'|'.join(map(str, self.order))}:"]
        lines += [f"  {c.status:<9} {c.impl_id}: {c.reason}" for c in self.candidates]
        return "\n".join(lines)


def resolve(
    op: str,
    impls: Iterable[Impl],
    policy: SelectionPolicy,
    *,
    mode: Mode = "eager",
    rejections: Mapping[str, str] | None = None,
    engine: bool = False,
    foreign: Mapping[str, str] | None = None,
    tokens: int | None = None,
) -> Trace:
    """Order the candidates of one op.

    A vendor filter or a given rejection comes first, then a list that does not name the candidate,
    then the machine. Only listed tokens count; inside a token the higher priority comes first, then
    the impl id; priority never crosses tokens.

    Args:
        op: the op's name.
        impls: what is installed for it.
        policy: what decides.
        mode: the engine's mode; lists may differ by it.
        rejections: impl id -> why it is rejected whatever the policy says (demoted, blacklisted).
        engine: whether `stock` is a candidate: where the order names it, else at the end. In strict
            mode a list of the user's that names neither it nor `foreign` leaves it out.
        foreign: the layers of the op that another plugin has replaced -> whose they are. That is a
            candidate then: where the order names `foreign`, else the first one. If other sizes
            name it, it is the last one.
        tokens: how many tokens a call has, where the policy orders the op by size; None is more
            than every ceiling.
    """
    order = policy.order(op, mode, engine=engine, tokens=tokens)
    listed = policy.listed(op, mode)
    whose = "your" if listed is not None and listed.pinned else "the"
    rejections = rejections or {}
    ranked: list[tuple[tuple[int, int, str], Impl | Stock, str]] = []
    rejected: list[Candidate] = []
    for impl in sorted(impls, key=lambda i: (i.kind.value, i.impl_id)):
        place = next((n for n, token in enumerate(order) if token.matches(impl)), None)
        rejection = policy.refuses(impl) or rejections.get(impl.impl_id)
        if rejection is None and place is None:
            rejection = f"not listed: {'|'.join(map(str, order))}"
        if rejection is None:
            verdict = impl.availability()
            rejection = None if verdict is True else f"{UNAVAILABLE}{verdict}"
        if rejection is not None or place is None:
            rejected.append(Candidate(impl, "rejected", rejection or ""))
        else:
            rank = (place, -(impl.priority or 0), impl.impl_id)
            ranked.append((rank, impl, f"{whose} order says {order[place]}"))
    named = {token.kind: n for n, token in enumerate(order)}
    forced = policy.strict and listed is not None and listed.pinned and "foreign" not in named
    if engine and foreign:
        rows = listed.rows(mode) if listed else ()
        elsewhere = any(token.kind == "foreign" for _, tokens in rows for token in tokens)
        place = named.get("foreign", len(order) if elsewhere else -1)
        (layer, owner), *others = foreign.items()
        more = f", and so {len(others)} more" * bool(others)
        reason = f"layer {layer} is {owner}, not vllm-fl's{more}"
        if place < 0:
            reason += ": to take it, name foreign behind yours"
        ranked.append(((place, 0, ""), FOREIGN, reason))
    if engine and "stock" in named:
        ordered = listed or policy.prefer == "stock"
        reason = f"{whose} order says stock" if ordered else UNORDERED
        ranked.append(((named["stock"], 0, ""), STOCK, reason))
    elif engine and not forced:
        ranked.append(((len(order), 0, ""), STOCK, "vLLM's own code comes last"))
    candidates = [
        Candidate(impl, "selected" if n == 0 else "eligible", reason)
        for n, (_, impl, reason) in enumerate(sorted(ranked, key=itemgetter(0)))
    ]
    return Trace(op, mode, order, (*candidates, *rejected))


def describe(impl: Impl | Stock) -> str:
    """`'vendor.cpu' (kind=vendor, vendor=cpu)`: an implementation in a log line."""
    kind = impl.token if isinstance(impl, Stock) else impl.kind.value
    return f"'{impl.impl_id}' (kind={kind}, vendor={impl.vendor})"
