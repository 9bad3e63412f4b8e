"""Merge the settings files that several distributions provide for one platform."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import cast

from ..plugins.setting import SettingSpec
from ..plugins.types import Impl
from .files import Entries
from .policy import ENGINE_ORDERS, MODES, Mode, OpOrder, Rows, Selector
from .schema import Declared, Setting, pairs
from .values import ORDER_PREFIX, wrong

Brought = Mapping[str, Sequence[tuple[str, Impl]]]
"""Op -> [(`Owner.name`, implementation)] for all installed implementations."""


def unite(files: Sequence[tuple[str, Entries]], brought: Brought, declared: Declared) -> Entries:
    """Merge files into one layer. The order of the files does not matter.

    In the order of an op, each file ranks its distribution's implementations. Blacklists and
    `deny_vendors` are joined. Whitelists are intersected, and names of a blacklist are removed. Any
    other setting with different values returns to its default. Raises SettingsError if a file sets
    both lists of a pair.
    """
    several: dict[str, list[tuple[str, Setting]]] = {}
    for distribution, layer in sorted(files, key=itemgetter(0)):
        close_pairs(dict(layer), declared)
        for key, setting in layer.items():
            several.setdefault(key, []).append((distribution, setting))
    united = {}
    for key in sorted(several, key=lambda key: key.startswith(ORDER_PREFIX)):  # after `prefer`
        each = several[key]
        if len(each) == 1:
            united[key] = each[0][1]
        elif key.startswith(ORDER_PREFIX):
            prefer = united["prefer"].value if "prefer" in united else declared["prefer"].default
            impls = brought.get(key.removeprefix(ORDER_PREFIX), ())
            united[key] = _united_order(each, impls, ENGINE_ORDERS[cast("str", prefer)])
        else:
            united[key] = _united([setting for _, setting in each], declared.get(key))
    for white, black in pairs(declared):
        if white in united and black in united:
            kept, out = united[white], united.pop(black)
            names = tuple(name for name in kept.names if name not in out.names)
            if names != kept.value:
                origin = f"{kept.origin}, without the names in {out.origin}"
                united[white] = dataclasses.replace(kept, value=names, origin=origin)
    close_pairs(united, declared)
    return united


def close_pairs(layer: Entries, declared: Declared) -> None:
    """Clear a layer's blacklist if the layer sets the whitelist, and vice versa. Otherwise the
    other list of a lower layer would apply as well. Raises SettingsError if the layer sets both."""
    for white, black in pairs(declared):
        if white in layer and black in layer:
            raise wrong(
                white,
                layer[white].origin,
                f"{black} is also set ({layer[black].origin}); use only one of them",
            )
        if white in layer:
            layer[black] = Setting(black, (), f"cleared by {white}")
        elif black in layer:
            layer[white] = Setting(white, None, f"cleared by {black}")


def _united(settings: Sequence[Setting], spec: SettingSpec[object] | None) -> Setting:
    values = [setting.value for setting in settings]
    origin = _and(setting.origin for setting in settings)
    default = spec.default if spec else ()
    value = values[0]
    if not (spec.names if spec else all(isinstance(value, tuple) for value in values)):
        if any(other != value for other in values):
            value, origin = default, f"default, since {origin} differ"
    elif default is not None:
        value = tuple(dict.fromkeys(name for setting in settings for name in setting.names))
    else:
        every = [{*setting.names} for setting in settings]
        if any(names != every[0] for names in every):
            value = tuple(sorted(set.intersection(*every)))
    return _merged(settings, value, origin)


def _united_order(
    each: Sequence[tuple[str, Setting]], impls: Sequence[tuple[str, Impl]], default: Sequence[str]
) -> Setting:
    """Merge the orders of one op, for each of the engine's modes. The files are sorted by the kinds
    of their distributions, in the default order. The result begins with the first file's order.
    Selectors of other files are inserted directly before `stock`, or after it if they follow
    `stock` in their file."""

    def rank(distribution: str) -> tuple[int, str]:
        kinds = [default.index(impl.kind.value) for owner, impl in impls if owner == distribution]
        return min(kinds, default=len(default)), distribution

    listing = {distribution for distribution, _ in each}
    sides: dict[Mode, Rows[tuple[Selector, ...]]] = {}
    stock = Selector("stock")
    for mode in MODES:
        before: list[Selector] = []
        after: list[Selector] = []
        for distribution, setting in sorted(each, key=lambda item: rank(item[0])):
            side = before
            for _, selectors in cast("OpOrder", setting.value).rows(mode):  # always one row
                for selector in selectors:
                    side = after if selector == stock else side
                    others = listing - {distribution}
                    side += _narrowed(selector, [*before, *after], others, impls)
        order = tuple(dict.fromkeys((*before, *after)))
        sides[mode] = ((None, order or (stock,)),) if before or after else ()
    value = OpOrder(sides["eager"], sides["compiled"], pinned=False)
    settings = [setting for _, setting in each]
    return _merged(settings, value, _and(setting.origin for setting in settings))


def _narrowed(
    selector: Selector,
    earlier: Sequence[Selector],
    others: set[str],
    impls: Sequence[tuple[str, Impl]],
) -> Iterator[Selector]:
    matched = [(owner, impl) for owner, impl in impls if selector.matches(impl)]
    if not any(owner in others for owner, _ in matched):
        yield selector
        return
    matched.sort(key=lambda item: (-(item[1].priority or 0), item[1].impl_id))
    for owner, impl in matched:
        if owner not in others and not any(each.matches(impl) for each in earlier):
            yield Selector("impl", impl.impl_id)


def _merged(settings: Sequence[Setting], value: object, origin: str) -> Setting:
    overrides = tuple((setting.value, setting.origin) for setting in settings)
    return dataclasses.replace(settings[0], value=value, origin=origin, overrides=overrides)


def _and(origins: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(origins))
