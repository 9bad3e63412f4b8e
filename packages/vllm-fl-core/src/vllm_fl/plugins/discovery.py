"""Find the installed plugins, and select the allowed ones. No plugin is imported."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from importlib import import_module
from typing import NoReturn

from ..errors import PluginError
from ..text import clean, nearest
from .installed import canonical, entry_points, metadata_of
from .plugin import Kind, Owner, Plugin
from .reserved import EXTENDERS

BACKENDS = "vllm_fl.plugin"
CONTRACTS = "vllm_fl.contracts"
"""The group of plugins with only contracts, which are loaded with any backend."""
EXTENSIONS = "vllm_fl.extension"
"""The group of extensions: plugins of this project that add features to engines."""

PLUGIN_KINDS: dict[str, Kind] = {
    BACKENDS: "backend",
    CONTRACTS: "contracts",
    EXTENSIONS: "extension",
}


def ban_of(plugin: Plugin) -> PluginError | None:
    """Return why a plugin must never be imported, or None."""
    if plugin.kind != "extension" or plugin.owner.is_of(*EXTENDERS):
        return None
    return plugin.owner.error(
        f" is not imported: the group {EXTENSIONS} is only for {', '.join(sorted(EXTENDERS))}. "
        f"Its author should use the group {BACKENDS}."
    )


def discover(modules: Iterable[str] = ()) -> tuple[Plugin, ...]:
    """Return the installed plugins, ordered by distribution name, then the user's modules. None is
    imported."""
    found = []
    for entry in entry_points(*PLUGIN_KINDS):
        dist = entry.dist
        name, version, problem = (None, None, "") if dist is None else metadata_of(dist)
        owner = Owner(
            plugin=entry.name,
            distribution=name,
            version=version,
            path=str(dist.locate_file("")) if dist else None,
        )
        load = partial(_fail, problem) if problem else entry.load
        found.append(Plugin(owner, entry.value, load, PLUGIN_KINDS[entry.group]))
    found.sort(key=lambda p: (canonical(p.owner.distribution or ""), p.owner.plugin, p.target))
    named = (Plugin(Owner(plugin=name), name, partial(import_module, name)) for name in modules)
    return (*found, *named)


def select_allowed(found: Sequence[Plugin], only: Collection[str] | None) -> list[Plugin]:
    """Return the plugins that may load. Contracts are not loaded if the user allows no plugin."""
    names = {canonical(name) for name in only or ()}

    def is_named(each: Plugin) -> bool:
        # Modules have no distribution. VLLM_FL_PLUGIN_MODULES lists them.
        return only is None or each.owner.distribution is None or each.owner.is_of(*names)

    kinds = {"extension"}
    if only or any(map(is_named, found)):
        kinds.add("contracts")
    return [
        each for each in found if ban_of(each) is None and (each.kind in kinds or is_named(each))
    ]


def remedy_for(plugin: Plugin, allowed: Iterable[Plugin]) -> str:
    """Return how to run without a plugin that fails to load."""
    if plugin.kind != "backend":
        return "Reinstall it."
    if plugin.owner.distribution is None:
        return "Fix it, or remove it from VLLM_FL_PLUGIN_MODULES."
    backends = {p.owner.distribution for p in allowed if p.kind == "backend"}
    others = sorted(clean(name) for name in backends - {plugin.owner.distribution, None} if name)
    rest = ",".join(others) or "''"
    return f"No other plugin needs it: reinstall it, or disable it with VLLM_FL_PLUGINS={rest}."


def unmatched_plugins(owners: Iterable[Owner], only: Collection[str] | None) -> tuple[str, ...]:
    """Return a sentence for each name in VLLM_FL_PLUGINS without an installed plugin."""
    known = sorted({canonical(owner.distribution) for owner in owners if owner.distribution})
    found = []
    for name in only or ():
        wanted = canonical(name)
        if wanted not in known:
            slip = next((each for each in known if wanted in each), None) or nearest(wanted, known)
            found.append(
                f"VLLM_FL_PLUGINS: {name!r} is not an installed distribution with a plugin; it "
                f"loads nothing.{f' Did you mean {slip!r}?' if slip else ''} Installed: "
                f"{', '.join(known) or 'none'}."
            )
    return tuple(found)


def _fail(problem: str) -> NoReturn:
    raise FileNotFoundError(problem)
