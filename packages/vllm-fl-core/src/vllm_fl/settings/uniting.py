"""Uniting the settings files that several distributions ship for one platform."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import cast, get_args

from ..plugins.types import Impl
from .files import Layer
from .merging import Listed, merge
from .policy import ENGINE_ORDERS, Mode, OpOrder, Rows, Token
from .schema import Declared, Setting, pairs
from .values import ORDER_PREFIX, wrong

__all__ = ["Brought", "close_pairs", "unite"]

Brought = Mapping[str, Sequence[tuple[str, Impl]]]
"""Op -> (who brings it, as platform files are named; the implementation) of what is installed."""


def unite(files: Sequence[tuple[str, Layer]], brought: Brought, declared: Declared) -> Layer:
    """One layer of several files. It does not depend on the order in which they are given.

    Orders of one op are merged, blacklists and `deny_vendors` add up, of whitelists what all
    list is left, without what a blacklist names; another item that two set differently goes back
    to the default.

    Args:
        files: (distribution, what its file sets).
        brought: what is installed; a distribution's word about its own counts double.
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
    united = {
        key: _scalar([setting for _, setting in each], declared)
        for key, each in said.items()
        if not key.startswith(ORDER_PREFIX)
    }
    preferred = united["prefer"].value if "prefer" in united else declared["prefer"].default
    default = ENGINE_ORDERS[cast("str", preferred)]
    for key, each in said.items():
        if key.startswith(ORDER_PREFIX):
            op = key.removeprefix(ORDER_PREFIX)
            united[key] = _order(each, brought.get(op, ()), default)
    for white, black in pairs(declared):
        if white in united and black in united:
            kept, out = united[white], united.pop(black)
            names = tuple(name for name in kept.names if name not in out.names)
            if names != kept.value:
                origin = f"{kept.origin}, without what {out.origin} names"
                united[white] = dataclasses.replace(kept, value=names, origin=origin)
    close_pairs(united, declared)
    return united


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


def _scalar(settings: Sequence[Setting], declared: Declared) -> Setting:
    first = settings[0]
    if len(settings) == 1:
        return first
    key, values = first.key, [setting.value for setting in settings]
    origins = _and(setting.origin for setting in settings)
    value, differ = first.value, any(value != first.value for value in values)
    disagreements: list[str] = []
    spec = declared.get(key)
    default = spec.default if spec else ()
    listed = spec.names if spec else all(isinstance(value, tuple) for value in values)
    if listed and default is not None:
        value = tuple(dict.fromkeys(name for setting in settings for name in setting.names))
    elif listed and differ:
        every = [set(setting.names) for setting in settings]
        value = tuple(sorted(set.intersection(*every)))
        disagreements = ["they list different names; only what each of them lists is used"]
    elif differ:
        value = default
        said = ", ".join(f"{_plain(setting.value)} ({setting.origin})" for setting in settings)
        disagreements = [f"they set {said}; the default holds, {_plain(value)}"]
        origins = f"default, since {origins} differ"
    return dataclasses.replace(
        first,
        value=value,
        origin=origins,
        merged=tuple((setting.value, setting.origin) for setting in settings),
        disagreements=tuple(disagreements),
    )


def _order(
    each: Sequence[tuple[str, Setting]],
    impls: Sequence[tuple[str, Impl]],
    default: Sequence[str],
) -> Setting:
    """The order of one op, merged for each of the engine's modes."""
    first = each[0][1]
    if len(each) == 1:
        return first
    sides: dict[Mode, Rows[tuple[Token, ...]]] = {}
    left_out: set[tuple[str, str]] = set()
    dropped: dict[Mode, str] = {}
    for mode in cast("tuple[Mode, ...]", get_args(Mode)):
        lists = [
            _listed(distribution, tokens, impls)
            for distribution, setting in each
            for _, tokens in cast("OpOrder", setting.value).rows(mode)  # one: no file has more
        ]
        merged = merge(lists, default)
        sides[mode] = ((None, merged.tokens),) if merged.tokens else ()
        if merged.dropped:
            dropped[mode] = "; ".join(map(str, merged.dropped))
        if len(lists) > 1:
            left_out |= {(mode, impl_id) for impl_id in _left_out(lists, impls)}
    if len(dropped) == len(sides) and len(set(dropped.values())) == 1:
        remarks = [f"the merged order does not follow {dropped['eager']}"]
    else:
        remarks = [f"{m}: the merged order does not follow {text}" for m, text in dropped.items()]
    return dataclasses.replace(
        first,
        value=OpOrder(sides["eager"], sides["compiled"], False, frozenset(left_out)),
        origin=_and(setting.origin for _, setting in each),
        merged=tuple((setting.value, setting.origin) for _, setting in each),
        disagreements=tuple(remarks),
    )


def _listed(
    distribution: str,
    tokens: tuple[Token, ...],
    impls: Sequence[tuple[str, Impl]],
) -> Listed:
    """A list with the tokens that stand for implementations of its distribution alone."""
    owners = {token: {owner for owner, impl in impls if token.matches(impl)} for token in tokens}
    owns = frozenset(token for token in tokens if owners[token] == {distribution})
    return Listed(distribution, tokens, owns)


def _left_out(lists: Sequence[Listed], impls: Sequence[tuple[str, Impl]]) -> set[str]:
    """The implementations that no list of their own distribution names, though it has one."""
    listed: dict[str, set[Token]] = {}
    for each in lists:
        listed.setdefault(each.source, set()).update(each.tokens)
    return {
        impl.impl_id
        for owner, impl in impls
        if owner in listed and not any(token.matches(impl) for token in listed[owner])
    }


def _origins(layer: Layer) -> list[str]:
    return sorted(setting.origin for setting in layer.values())


def _and(origins: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(origins))


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
