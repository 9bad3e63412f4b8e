"""Uniting the settings files that several distributions ship for one platform."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import cast

from ..plugins.setting import SettingSpec
from ..plugins.types import Impl
from .files import Layer
from .policy import ENGINE_ORDERS, MODES, Mode, OpOrder, Rows, Token
from .schema import Declared, Setting, pairs
from .values import ORDER_PREFIX, wrong

Brought = Mapping[str, Sequence[tuple[str, Impl]]]
"""Op -> (who brings it, as platform files are named; the implementation) of what is installed."""


@dataclass(frozen=True)
class Listed:
    """The order of one op in one file.

    Args:
        tokens: the tokens, best first, each once.
        own: those of them that stand for implementations of the file's distribution.
    """

    tokens: tuple[Token, ...]
    own: frozenset[Token] = frozenset()


def unite(files: Sequence[tuple[str, Layer]], brought: Brought, declared: Declared) -> Layer:
    """One layer of several files. It does not depend on the order in which they are given.

    Orders of one op unite (`unite_orders`). Blacklists and `deny_vendors` add up. Of whitelists
    the names that all list are left, without those of a blacklist. Another item that two set
    differently goes back to the default.

    Args:
        files: (distribution, what its file sets).
        brought: what is installed, which says whose a token is.
        declared: the settings that there are.

    Raises:
        SettingsError: one file sets the whitelist and the blacklist of a pair.
    """
    for _, layer in files:
        close_pairs(dict(layer), declared)
    said: dict[str, list[tuple[str, Setting]]] = {}
    for distribution, layer in sorted(files, key=lambda file: (file[0], _origins(file[1]))):
        for key, setting in layer.items():
            said.setdefault(key, []).append((distribution, setting))
    united = {key: each[0][1] for key, each in said.items() if len(each) == 1}
    several = {key: each for key, each in said.items() if len(each) > 1}
    for key, each in several.items():
        if not key.startswith(ORDER_PREFIX):
            united[key] = _united([setting for _, setting in each], declared.get(key))
    preferred = united["prefer"].value if "prefer" in united else declared["prefer"].default
    default = ENGINE_ORDERS[cast("str", preferred)]
    for key, each in several.items():
        if key.startswith(ORDER_PREFIX):
            impls = brought.get(key.removeprefix(ORDER_PREFIX), ())
            united[key] = _united_order(each, impls, default)
    for white, black in pairs(declared):
        if white in united and black in united:
            kept, out = united[white], united.pop(black)
            names = tuple(name for name in kept.names if name not in out.names)
            if names != kept.value:
                origin = f"{kept.origin}, without what {out.origin} names"
                united[white] = dataclasses.replace(kept, value=names, origin=origin)
    close_pairs(united, declared)
    return united


def unite_orders(
    lists: Sequence[Listed], default: Sequence[str]
) -> tuple[tuple[Token, ...], tuple[tuple[Token, Token], ...]]:
    """One order of several, and the pairs of tokens that they put differently, as they stand in it.

    How two tokens stand is for the lists to say that own one of them. Where none does, it is for
    all lists that name both. What those put differently goes by the default order, and so does
    what none of them says.

    Args:
        lists: the orders, in any order.
        default: the kinds of the default order, `stock` among them.
    """

    def rank(token: Token) -> tuple[int, str]:
        kind = token.preference
        return (default.index(kind) if kind in default else len(default), str(token))

    left = sorted({token for listed in lists for token in listed.tokens}, key=rank)
    said: set[tuple[Token, ...]] = set()
    for pair in combinations(left, 2):
        naming = [listed for listed in lists if {*pair} <= {*listed.tokens}]
        owning = [listed for listed in naming if listed.own & {*pair}]
        said |= {tuple(sorted(pair, key=listed.tokens.index)) for listed in owning or naming}
    agreed = {pair for pair in said if pair[::-1] not in said}
    order: list[Token] = []
    while left:
        free = (t for t in left if not any((before, t) in agreed for before in left))
        order.append(next(free, left[0]))  # none is free where three or more lists go in a circle
        left.remove(order[-1])
    disputed = tuple(pair for pair in combinations(order, 2) if pair[::-1] in said)
    return tuple(order), disputed


def close_pairs(layer: Layer, declared: Declared) -> None:
    """Let a layer's whitelist also settle its blacklist, and the other way round."""
    for white, black in pairs(declared):
        if white in layer and black in layer:
            raise wrong(
                white,
                layer[white].origin,
                f"{black} is set too ({layer[black].origin}); use one of the two",
            )
        if white in layer:
            layer[black] = Setting(black, (), layer[white].origin)
        elif black in layer:
            layer[white] = Setting(white, None, layer[black].origin)


def _united(settings: Sequence[Setting], spec: SettingSpec[object] | None) -> Setting:
    """A setting of several files that is no order."""
    values = [setting.value for setting in settings]
    origins = _and(setting.origin for setting in settings)
    default = spec.default if spec else ()
    disagreements: tuple[str, ...] = ()
    value: object
    if not (spec.names if spec else all(isinstance(value, tuple) for value in values)):
        value = values[0]
        if any(other != value for other in values):
            value, origins = default, f"default, since {origins} differ"
            disagreements = ("they set it differently; the default holds",)
    elif default is not None:
        value = tuple(dict.fromkeys(name for setting in settings for name in setting.names))
    else:
        every = [{*setting.names} for setting in settings]
        value = settings[0].value
        if any(names != every[0] for names in every):
            value = tuple(sorted(set.intersection(*every)))
            disagreements = ("they list different names; only what each of them lists is used",)
    return _merged(settings, value, origins, disagreements)


def _united_order(
    each: Sequence[tuple[str, Setting]],
    impls: Sequence[tuple[str, Impl]],
    default: Sequence[str],
) -> Setting:
    """The order of one op, for each of the engine's modes."""
    sides: dict[Mode, Rows[tuple[Token, ...]]] = {}
    modes_of: dict[tuple[Token, Token], list[str]] = {}
    for mode in MODES:
        lists: list[Listed] = []
        excluded: set[str] = set()
        for distribution, setting in each:
            own = [impl for owner, impl in impls if owner == distribution]
            for _, tokens in cast("OpOrder", setting.value).rows(mode):  # one: no file has more
                mine = frozenset(t for t in tokens if any(t.matches(impl) for impl in own))
                lists.append(Listed(tokens, mine))
                excluded |= {i.impl_id for i in own if not any(t.matches(i) for t in mine)}
        order, disputed = unite_orders(lists, default)
        if len(lists) > 1:
            order = _without(order, excluded, [impl for _, impl in impls])
        sides[mode] = ((None, order),) if order else ()
        for pair in disputed:
            modes_of.setdefault(pair, []).append(mode)
    disagreements = (
        f"they put {one} and {other} differently; by the default order {one} is first"
        + f" ({modes[0]} mode)" * (len(modes) == 1)
        for (one, other), modes in modes_of.items()
    )
    value = OpOrder(sides["eager"], sides["compiled"], pinned=False)
    settings = [setting for _, setting in each]
    return _merged(settings, value, _and(s.origin for s in settings), tuple(disagreements))


def _without(
    order: Sequence[Token], excluded: set[str], impls: Sequence[Impl]
) -> tuple[Token, ...]:
    """The order without what the list of its own distribution does not name.

    A token that stands for such an implementation gives way to the others that it stands for.
    """
    kept: list[Token] = []
    for token in order:
        matched = [impl for impl in impls if token.matches(impl)]
        if not any(impl.impl_id in excluded for impl in matched):
            kept.append(token)
            continue
        matched.sort(key=lambda impl: (-(impl.priority or 0), impl.impl_id))
        kept += [Token("impl", i.impl_id) for i in matched if i.impl_id not in excluded]
    return tuple(dict.fromkeys(kept)) or (Token("stock"),)


def _merged(
    settings: Sequence[Setting], value: object, origin: str, disagreements: tuple[str, ...]
) -> Setting:
    """The setting that holds in the place of these, which it remembers."""
    return dataclasses.replace(
        settings[0],
        value=value,
        origin=origin,
        merged=tuple((setting.value, setting.origin) for setting in settings),
        disagreements=disagreements,
    )


def _origins(layer: Layer) -> list[str]:
    return sorted(setting.origin for setting in layer.values())


def _and(origins: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(origins))
