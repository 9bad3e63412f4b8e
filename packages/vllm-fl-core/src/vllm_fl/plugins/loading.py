"""Discover the installed plugins and load each in isolation.

pluggy checks the hooks and collects their results while a process starts; it is never on a call
path. Each plugin has a plugin manager of its own, so that a broken one does not affect the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from inspect import getattr_static
from itertools import islice
from types import MappingProxyType, ModuleType
from typing import Any

import pluggy

from ..errors import PluginError
from ..text import clean
from . import hookspecs
from .calling import BARRED, contained, whose
from .hookspecs import HOOK_API, PROJECT
from .installed import canonical, entry_points, identity
from .plugin import Plugin, Status
from .registry import OpRegistry, Owner, RegistrySnapshot, reservation
from .types import AttentionImpl, OpImpl

__all__ = ["GROUP", "Found", "discover", "load", "unmatched"]

GROUP = "vllm_fl.plugin"
OLD_NAMES = ("register_builtins", "vllm_fl_register", "register")
LOAD_FAILED = "The other plugins work; reinstall it, or leave it out with VLLM_FL_PLUGINS."

MOST = 10_000
"""Implementations of one plugin; a generator that gives more never ends."""


@dataclass(frozen=True)
class Found:
    """An entry point, or a module from VLLM_FL_PLUGIN_MODULES, not yet loaded."""

    owner: Owner
    target: str
    load: Callable[[], object]


def discover(modules: Iterable[str] = ()) -> tuple[Found, ...]:
    """The installed plugins, by distribution name, then the modules named by the user.

    Reads metadata only; nothing is imported.
    """
    found = []
    for entry in entry_points(GROUP):
        dist = entry.dist
        name, version, problem = (None, None, "") if dist is None else identity(dist)
        owner = Owner(
            plugin=entry.name,
            distribution=name,
            version=version,
            path=os.fspath(dist.locate_file("")) if dist else None,
        )
        load = _raising(problem) if problem else entry.load
        found.append(Found(owner, entry.value, load))
    found.sort(key=lambda f: (canonical(f.owner.distribution or ""), f.owner.plugin, f.target))
    seen: set[tuple[str | None, str, str]] = set()
    unique = []
    for f in found:  # one distribution may lie on the path twice, as an editable install does
        key = (f.owner.distribution, f.owner.plugin, f.target)
        if key not in seen:
            seen.add(key)
            unique.append(f)
    for name in modules:
        unique.append(Found(Owner(plugin=name), name, _module_loader(name)))
    return tuple(unique)


def load(
    registry: OpRegistry,
    found: Sequence[Found],
    *,
    only: Collection[str] | None = None,
    variables: Collection[str] = (),
) -> tuple[Plugin, ...]:
    """Load plugins into `registry`, each in isolation.

    An (op, id) that two of them claim, or that is reserved for another one, is loaded from nobody
    but the one that it is reserved for; their other implementations stay.

    Args:
        registry: what they register into. A plugin that fails leaves nothing in it.
        found: the plugins, in the order in which they are loaded.
        only: the distributions to load, beside the modules that were named; None loads all.
        variables: the environment variables that are settings, beside all VLLM_FL_*: they are the
            user's, and what a plugin sets of them while it is loaded is undone.
    """
    names = None if only is None else {canonical(name) for name in only}
    brought: list[tuple[Plugin, list[Any]]] = []
    for candidate in found:
        owner = candidate.owner
        # A module has no distribution: VLLM_FL_PLUGIN_MODULES has asked for it by name already.
        if names is not None and owner.distribution and canonical(owner.distribution) not in names:
            brought.append((Plugin(owner, candidate.target, "disabled"), []))
        else:
            brought.append(_bring(candidate, registry, variables))
    claims: dict[tuple[str, str], list[Owner]] = {}
    for plugin, impls in brought:
        for key in dict.fromkeys(map(_key, impls)):
            if key is not None:
                claims.setdefault(key, []).append(plugin.owner)
    return tuple(
        _register(registry, plugin, impls, claims) if plugin.status == "ok" else plugin
        for plugin, impls in brought
    )


def _bring(
    found: Found, registry: OpRegistry, variables: Collection[str]
) -> tuple[Plugin, list[Any]]:
    """Import one plugin and ask it for its implementations; nothing is registered yet."""
    owner = found.owner
    hooks: tuple[str, ...] = ()
    impls: list[Any] = []
    manager = None
    before = _set_now(variables)
    try:
        if (ended := BARRED.get(whose(owner))) is not None:
            raise PluginError(
                f"{owner.who} failed: {ended}. {LOAD_FAILED}",
                plugin=owner.plugin,
                distribution=owner.release,
            )
        with contained(owner, "the import", LOAD_FAILED):
            plugin = found.load()
            hooks, old_form = _forms(plugin)
            _check_api(plugin)
            owner = replace(owner, kernels=_kernels(plugin))
        with contained(owner, "the registration", LOAD_FAILED):
            if old_form is not None:
                impls = _run_old_form(old_form, registry)
            else:
                manager = pluggy.PluginManager(PROJECT)
                manager.add_hookspecs(hookspecs)
                manager.register(plugin, name=str(owner))
                manager.check_pending()
                for hook in ("register_ops", "attention_backend"):
                    impls += _results(manager, hook)
    except PluginError as error:
        return Plugin(
            owner,
            found.target,
            "failed",
            hooks,
            error=error,
            remarks=_undo(before, variables, owner),
        ), []
    return Plugin(
        owner, found.target, "ok", hooks, manager=manager, remarks=_undo(before, variables, owner)
    ), impls


def _register(
    registry: OpRegistry,
    plugin: Plugin,
    impls: list[Any],
    claims: Mapping[tuple[str, str], Sequence[Owner]],
) -> Plugin:
    """Register what one plugin brings, without the ids that are not its own."""
    owner = plugin.owner
    kept, lost = [], {}
    for impl in impls:
        key = _key(impl)
        why = "" if key is None else _not_its_own(key, owner, claims[key])
        if key is None or not why:
            kept.append(impl)
        else:
            lost[key] = why
    claimed = tuple(dict.fromkeys(key[1] for key in map(_key, impls) if key is not None))
    error = None
    if lost:
        (op, impl_id), _ = next(iter(lost.items()))
        error = PluginError(
            f"{owner.who}: not loaded: "
            + "; ".join(f"{o} implementation {i!r}: {why}" for (o, i), why in lost.items())
            + ". What else it brings is loaded.",
            op=op,
            impl=impl_id,
            plugin=owner.plugin,
            distribution=owner.release,
        )
    try:
        with contained(owner, "the registration", LOAD_FAILED):
            try:
                registry.register_many(kept, owner)
            except PluginError as refused:
                if refused.plugin != owner.plugin:
                    raise  # from code of the plugin's that was asked for its parameters
                # The registry's own: it says whose it is.
                return replace(plugin, status="failed", claims=claimed, error=refused, manager=None)
    except PluginError as failed:
        return replace(plugin, status="failed", claims=claimed, error=failed, manager=None)
    status: Status = "ok" if error is None else "partial" if kept else "failed"
    return replace(
        plugin,
        status=status,
        claims=claimed,
        error=error,
        manager=plugin.manager if status != "failed" else None,
        lost=tuple(lost),
    )


def _key(impl: object) -> tuple[str, str] | None:
    if isinstance(impl, OpImpl | AttentionImpl) and isinstance(impl.op_name, str):
        return impl.op_name, impl.impl_id
    return None  # the registry refuses it, by name


def _not_its_own(key: tuple[str, str], owner: Owner, claimants: Sequence[Owner]) -> str:
    """Why `owner` may not register this (op, id); empty when it may."""
    barred = reservation(key[1], owner)
    if barred:
        return f"{barred}; leave {owner.name} out with VLLM_FL_PLUGINS, or uninstall it"
    others = [other for other in claimants if other != owner and not reservation(key[1], other)]
    if not others:
        return ""
    holders = [other for other in (owner, *others) if _holds(key[1], other)]
    if owner in holders:
        return ""
    named = ", ".join(clean(str(other)) for other in holders or others)
    ending = "it is loaded from there" if holders else "it is loaded from none of them"
    return (
        f"{named} claims it too, and {ending}; uninstall all but one, or name the ones to load in "
        "VLLM_FL_PLUGINS"
    )


def _holds(impl_id: str, owner: Owner) -> bool:
    """Whether the id is reserved for this very distribution."""
    stranger = Owner("", distribution="(nobody)")
    return owner.distribution is not None and bool(reservation(impl_id, stranger))


def _set_now(variables: Collection[str]) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k in variables or k.startswith("VLLM_FL_")}


def _undo(before: Mapping[str, str], variables: Collection[str], owner: Owner) -> tuple[str, ...]:
    """Take back what a plugin did to the settings' variables: they are the user's."""
    after = _set_now(variables)
    changed = sorted(k for k in {*before, *after} if before.get(k) != after.get(k))
    for name in changed:
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]
    if not changed:
        return ()
    return (
        f"Plugin {clean(owner.plugin)!r} of {clean(owner.name)} set "
        f"{', '.join(map(clean, changed))} while it was loaded; that was undone: these "
        "variables are the user's. A plugin ships its settings by the policy hook.",
    )


def _kernels(plugin: object) -> tuple[str, ...]:
    """The distributions that the plugin declares its implementations to run the code of."""
    names = getattr(plugin, "KERNEL_DISTRIBUTIONS", ())
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"its KERNEL_DISTRIBUTIONS is {names!r}; expected a tuple of distributions' names"
        )
    return tuple(names)


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
        import difflib  # only for a word that is wrong

        meant += difflib.get_close_matches(wanted, known, n=1)
        suggestion = f" Did you mean {meant[0]!r}?" if meant else ""
        told.append(
            f"VLLM_FL_PLUGINS names {name!r}, which is no installed distribution with a plugin: it "
            f"loads nothing.{suggestion} Installed are {', '.join(sorted(known)) or 'none'}."
        )
    return tuple(told)


def _forms(plugin: object) -> tuple[tuple[str, ...], Callable[[Any], object] | None]:
    """The hooks that `plugin` implements, or its older `register_builtins(registry)`."""
    marked = tuple(
        name
        for name in sorted(dir(plugin))
        if getattr(getattr(plugin, name, None), f"{PROJECT}_impl", None)
    )
    if marked and not isinstance(plugin, type):
        return marked, None
    if callable(plugin) and not isinstance(plugin, type):
        return ("register_builtins",), plugin
    for name in OLD_NAMES:
        function = getattr(plugin, name, None)
        static = getattr_static(plugin, name, None)
        if callable(function) and (
            not isinstance(plugin, type) or isinstance(static, classmethod | staticmethod)
        ):
            return ("register_builtins",), function
    raise TypeError(
        f"it points at {plugin!r}, which implements no hook: point it at a module whose functions "
        "carry @hookimpl, or at register_builtins(registry)"
    )


def _check_api(plugin: object) -> None:
    wanted = getattr(plugin, "HOOK_API", HOOK_API)
    if wanted != HOOK_API:
        raise RuntimeError(
            f"it is written for HOOK_API {wanted}, this vllm-fl-core has {HOOK_API}; "
            f"install the {'older' if wanted > HOOK_API else 'newer'} release of it"
            if isinstance(wanted, int)
            else f"its HOOK_API is {wanted!r}, expected the integer {HOOK_API}"
        )


def _results(manager: pluggy.PluginManager, hook: str) -> list[OpImpl | AttentionImpl]:
    """What one plugin's hook returns, as a list. A generator runs to its end here."""
    impls: list[OpImpl | AttentionImpl] = []
    for result in getattr(manager.hook, hook)():
        if isinstance(result, str | bytes | dict) or not isinstance(result, Iterable):
            raise TypeError(
                f"{hook} returned {type(result).__name__}; expected an iterable of "
                f"{'OpImpl' if hook == 'register_ops' else 'AttentionImpl'}"
            )
        impls += islice(result, MOST - len(impls) + 1)
        if len(impls) > MOST:
            raise ValueError(f"{hook} returned more than {MOST} implementations: is it endless?")
    return impls


class _Collector:
    """The registry as the older form sees it: it collects, so that a failure leaves nothing.

    Reading it finds what is registered, and what was collected.
    """

    def __init__(self, registry: OpRegistry) -> None:
        self.impls: list[OpImpl | AttentionImpl] = []
        self.registered = registry

    def get_implementations(self, op: str) -> list[OpImpl | AttentionImpl]:
        mine = [impl for impl in self.impls if impl.op_name == op]
        return [*self.registered.get_implementations(op), *mine]

    def get_implementation(self, op: str, impl_id: str) -> OpImpl | AttentionImpl | None:
        return next((i for i in self.get_implementations(op) if i.impl_id == impl_id), None)

    def list_operators(self) -> list[str]:
        return sorted({*self.registered.list_operators(), *(i.op_name for i in self.impls)})

    def snapshot(self) -> RegistrySnapshot:
        impls = {op: tuple(self.get_implementations(op)) for op in self.list_operators()}
        return RegistrySnapshot(MappingProxyType(impls), self.registered.snapshot().owners)

    def register_impl(self, impl: OpImpl) -> None:
        self.impls.append(impl)

    def register_many(self, impls: Iterable[OpImpl]) -> None:
        self.impls += impls


def _run_old_form(
    function: Callable[[Any], object], registry: OpRegistry
) -> list[OpImpl | AttentionImpl]:
    collector = _Collector(registry)
    function(collector)
    if not collector.impls:
        raise TypeError(
            f"{getattr(function, '__qualname__', function)!r} was called with the registry, as the "
            "older form is, and registered nothing: point the entry point at a module whose "
            "functions carry @hookimpl, or register what it brings"
        )
    return collector.impls


def _module_loader(name: str) -> Callable[[], ModuleType]:
    return lambda: import_module(name)


def _raising(problem: str) -> Callable[[], object]:
    def load() -> object:
        raise FileNotFoundError(problem)

    return load
