"""Find the installed plugins, and which of them the settings allow. Nothing is imported."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import NoReturn

from ..errors import PluginError
from ..text import clean, nearest
from .installed import canonical, entry_points, identity, required_by
from .plugin import Kind, Owner
from .reserved import EXTENDERS, brings_ops, may_extend

GROUP = "vllm_fl.plugin"
CONTRACTS = "vllm_fl.contracts"
"""The group of plugins that bring contracts and nothing else. They are data: what is allowed to
load brings along those that it requires."""
EXTENSIONS = "vllm_fl.extension"
"""The group of extensions: plugins of this project that add features to engines."""

KINDS: dict[str, Kind] = {GROUP: "backend", CONTRACTS: "contracts", EXTENSIONS: "extension"}
"""Group -> what its plugins are for."""


@dataclass(frozen=True)
class Found:
    """An entry point, or a module from VLLM_FL_PLUGIN_MODULES, not yet loaded."""

    owner: Owner
    target: str
    load: Callable[[], object]
    kind: Kind = "backend"
    requires: frozenset[str] = frozenset()
    """The distributions that its own requires."""

    @property
    def refusal(self) -> PluginError | None:
        """The reason why it is never imported; None if it may be imported."""
        if self.kind != "extension" or may_extend(self.owner.distribution):
            return None
        return self.owner.error(
            f" is not imported: the group {EXTENSIONS} is only for {', '.join(sorted(EXTENDERS))}. "
            f"Its author should use the group {GROUP}."
        )


def discover(modules: Iterable[str] = ()) -> tuple[Found, ...]:
    """The installed plugins, by distribution name, then the modules named by the user.

    Reads metadata only; nothing is imported.
    """
    found = []
    for entry in entry_points(*KINDS):
        dist = entry.dist
        name, version, problem = (None, None, "") if dist is None else identity(dist)
        owner = Owner(
            plugin=entry.name,
            distribution=name,
            version=version,
            path=os.fspath(dist.locate_file("")) if dist else None,
        )
        load = partial(_fail, problem) if problem else entry.load
        requires = frozenset() if dist is None else required_by(dist)
        found.append(Found(owner, entry.value, load, KINDS[entry.group], requires))
    found.sort(key=lambda f: (canonical(f.owner.distribution or ""), f.owner.plugin, f.target))
    unique: dict[tuple[str | None, str, str], Found] = {}
    for f in found:  # one distribution may lie on the path twice, as an editable install does
        unique.setdefault((f.owner.distribution, f.owner.plugin, f.target), f)
    named = (Found(Owner(plugin=name), name, partial(import_module, name)) for name in modules)
    return (*unique.values(), *named)


def select_allowed(found: Sequence[Found], only: Collection[str] | None) -> list[Found]:
    """Those that may load: what the user names, the contracts that come along, and extensions.

    Extensions are always loaded. Contracts alone are data. They come along with
    what is named and requires them, and those of this project with whatever is named. Where nothing
    is named none of them is needed.
    """
    found = [each for each in found if each.refusal is None]
    if only is None:
        return found
    names = {canonical(name) for name in only}

    def is_named(each: Found) -> bool:
        # A module has no distribution: VLLM_FL_PLUGIN_MODULES has asked for it by name already.
        return each.owner.distribution is None or canonical(each.owner.distribution) in names

    extensions = [each for each in found if each.kind == "extension"]
    data = [each for each in found if each.kind == "contracts"]
    allowed = [each for each in found if is_named(each) and each not in extensions]
    if only or allowed:
        allowed += [each for each in data if brings_ops(each.owner) and each not in allowed]
    for each in allowed:  # grows while it is walked: contracts may require contracts
        allowed += [
            other
            for other in data
            if other not in allowed and canonical(other.owner.distribution or "") in each.requires
        ]
    return allowed + extensions


def remedy_for(found: Found, allowed: Iterable[str]) -> str:
    """What a failure at loading is followed by: how to do without this plugin.

    Args:
        found: the plugin.
        allowed: the distributions of the backends that are loaded.
    """
    owner = found.owner
    if found.kind == "extension":
        return "Reinstall it: VLLM_FL_PLUGINS does not leave it out."
    if found.kind == "contracts":
        return "Reinstall it: no engine runs an implementation of an op that has no contract."
    if owner.distribution is None:
        return "No other plugin needs it: mend it, or take it out of VLLM_FL_PLUGIN_MODULES."
    mine = canonical(owner.distribution)
    others = sorted({clean(name) for name in allowed if canonical(name) != mine})
    told = f"{','.join(others)} (all others)" if others else "'' (there is no other)"
    return f"No other plugin needs it: reinstall it, or leave it out with VLLM_FL_PLUGINS={told}."


def module_of(target: str) -> str:
    """The module that a plugin's entry point is in: `acme.plugin` of `acme.plugin:Plugin`."""
    return target.partition(":")[0].strip()


def unmatched(owners: Iterable[Owner], only: Collection[str] | None) -> tuple[str, ...]:
    """One sentence for each name in VLLM_FL_PLUGINS that no installed plugin's distribution has."""
    known = {canonical(o.distribution): o for o in owners if o.distribution}
    told = []
    for name in only or ():
        wanted = canonical(name)
        if wanted in known:
            continue
        meant = [d for d, o in known.items() if canonical(o.plugin) == wanted]
        meant += [d for d in known if d.removeprefix("vllm-fl-") == wanted.removeprefix("vllm-fl-")]
        slip = meant[0] if meant else nearest(wanted, known)
        suggestion = f" Did you mean {slip!r}?" if slip else ""
        told.append(
            f"VLLM_FL_PLUGINS names {name!r}, which is not an installed distribution with a "
            f"plugin: it loads nothing.{suggestion} Installed are "
            f"{', '.join(sorted(known)) or 'none'}."
        )
    return tuple(told)


def _fail(problem: str) -> NoReturn:
    raise FileNotFoundError(problem)
