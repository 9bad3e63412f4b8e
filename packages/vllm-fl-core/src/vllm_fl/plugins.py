"""Finding the installed plugins, loading each behind its own wall, and what became of it.

pluggy checks the hooks and collects their results while a process starts; it is never on a call
path. Each plugin has a plugin manager of its own, so that one that breaks costs itself only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from inspect import getattr_static
from types import ModuleType
from typing import Any, Literal

import pluggy

from . import hookspecs
from .dispatch.registry import OpRegistry, Owner, RegistrySnapshot
from .dispatch.types import AttentionImpl, DeviceProfile, OpImpl, PolicyDefaults
from .errors import PluginError
from .hookspecs import HOOK_API, PROJECT
from .installed import canonical, entry_points

__all__ = ["GROUP", "Plugin", "canonical", "discover", "find_device", "identity", "load", "rivals"]

GROUP = "vllm_fl.plugin"
OLD_NAMES = ("register_builtins", "vllm_fl_register", "register")
CORE = "vllm-fl-core"
ENGINE_GROUPS = ("vllm.platform_plugins", "vllm.general_plugins")


@dataclass(frozen=True)
class Plugin:
    """One installed plugin and what became of it.

    Args:
        owner: its entry point's name, distribution, version and path.
        target: what the entry point points at (`acme.plugin`).
        status: `ok`, `failed`, or `disabled` (VLLM_FL_PLUGINS leaves it out).
        hooks: the hooks that it implements; `register_builtins` is the older form.
        claims: the impl ids that it brought, or tried to bring.
        error: why it failed.
        manager: its hooks, to be called; None unless it is ok and has hooks.
    """

    owner: Owner
    target: str
    status: Literal["ok", "failed", "disabled"]
    hooks: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    error: PluginError | None = None
    manager: pluggy.PluginManager | None = None

    def may_bring(self, name: str) -> bool:
        """Whether an impl id or vendor called `name` would have come from this plugin."""
        vendor = name.removeprefix("vendor.")
        return name in self.claims or vendor in re.split(
            r"[-_.]", f"{self.owner.plugin}-{self.owner.distribution or ''}"
        )


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
    registry: OpRegistry, found: Sequence[Found], *, only: Collection[str] | None = None
) -> tuple[Plugin, ...]:
    """Load plugins into `registry`, each behind its own wall.

    Args:
        registry: what they register into. A plugin that fails leaves nothing in it.
        found: the plugins, in the order in which they are loaded.
        only: the distributions to load, beside the modules that were named; None loads all.
    """
    names = None if only is None else {canonical(name) for name in only}
    plugins = []
    for candidate in found:
        owner = candidate.owner
        # A module has no distribution: VLLM_FL_PLUGIN_MODULES has asked for it by name already.
        if names is not None and owner.distribution and canonical(owner.distribution) not in names:
            plugins.append(Plugin(owner, candidate.target, "disabled"))
            continue
        plugins.append(_load_one(registry, candidate))
    return tuple(plugins)


def _load_one(registry: OpRegistry, found: Found) -> Plugin:
    owner = found.owner
    hooks: tuple[str, ...] = ()
    claims: list[str] = []
    try:
        plugin = found.load()
        hooks, old_form = _forms(plugin)
        _check_api(plugin)
        manager = None
        if old_form is not None:
            impls = _run_old_form(old_form, registry)
        else:
            manager = pluggy.PluginManager(PROJECT)
            manager.add_hookspecs(hookspecs)
            manager.register(plugin, name=str(owner))
            manager.check_pending()
            impls = [*_results(manager, "register_ops"), *_results(manager, "attention_backend")]
        claims += [getattr(impl, "impl_id", repr(impl)) for impl in impls]
        registry.register_many(impls, owner)
        return Plugin(owner, found.target, "ok", hooks, tuple(claims), None, manager)
    except PluginError as error:
        return Plugin(owner, found.target, "failed", hooks, tuple(claims), error)
    # A plugin may do anything while it is imported, SystemExit included; only an interrupt is ours.
    except (Exception, SystemExit) as error:
        failure = PluginError(
            f"Plugin {owner.plugin!r} of {owner} failed: {type(error).__name__}: {error}. "
            "The other plugins work; reinstall it, or leave it out with VLLM_FL_PLUGINS.",
            plugin=owner.plugin,
            distribution=f"{owner.distribution} {owner.version}" if owner.distribution else None,
            op=_op_of(error),
            cause=error,
        )
        return Plugin(owner, found.target, "failed", hooks, tuple(claims), failure)


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
        impls += result
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
        return self.registered.snapshot()

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


def _op_of(error: BaseException) -> str | None:
    op = getattr(error, "op", None)
    return op if isinstance(op, str) else None


def policy_files(
    plugins: Sequence[Plugin], platform: str
) -> tuple[list[tuple[str, Any]], dict[str, PluginError]]:
    """The settings files that plugins ship for `platform`, and the errors of those that failed.

    Returns:
        [(distribution, path)] and {plugin name: its error}.
    """
    files: list[tuple[str, Any]] = []
    errors: dict[str, PluginError] = {}
    for plugin in plugins:
        if plugin.manager is None:
            continue
        try:
            for defaults in plugin.manager.hook.policy(platform=platform):
                if not isinstance(defaults, PolicyDefaults):
                    raise TypeError(f"policy returned {defaults!r}; expected PolicyDefaults")
                files.append((plugin.owner.name, defaults.path))
        except Exception as error:
            errors[plugin.owner.plugin] = PluginError(
                f"Plugin {plugin.owner.plugin!r} of {plugin.owner}: its policy hook failed: "
                f"{type(error).__name__}: {error}. Its implementations are kept, its settings not.",
                plugin=plugin.owner.plugin,
                distribution=str(plugin.owner.distribution),
                cause=error,
            )
    return files, errors


def devices(plugins: Sequence[Plugin]) -> list[tuple[Owner, DeviceProfile]]:
    """The hardware that plugins bring, each with who brings it.

    Raises:
        PluginError: a device hook failed; without it the engine would run elsewhere unnoticed.
    """
    found = []
    for plugin in plugins:
        if plugin.manager is None:
            continue
        try:
            for profile in plugin.manager.hook.device():
                if not isinstance(profile, DeviceProfile):
                    raise TypeError(f"device returned {profile!r}; expected DeviceProfile or None")
                found.append((plugin.owner, profile))
        except Exception as error:
            raise PluginError(
                f"Plugin {plugin.owner.plugin!r} of {plugin.owner}: its device hook failed: "
                f"{type(error).__name__}: {error}. Reinstall it, or leave it out with "
                "VLLM_FL_PLUGINS.",
                plugin=plugin.owner.plugin,
                distribution=str(plugin.owner.distribution),
                cause=error,
            ) from error
    return found


def find_device(plugins: Sequence[Plugin], name: str | None = None) -> DeviceProfile | None:
    """The device that this machine has, or None where no plugin brings one that it has.

    Args:
        plugins: what is loaded.
        name: the platform that the user forced: the device of that name and no other.

    Raises:
        PluginError: several claim the machine, or the forced one says that it is not there.
    """
    known = devices(plugins)
    if name is not None:
        known = [(owner, profile) for owner, profile in known if profile.name == name]
    verdicts = [(owner, profile, profile.detection()) for owner, profile in known]
    found = [(owner, profile) for owner, profile, verdict in verdicts if verdict is True]
    if len(found) > 1:
        names = ", ".join(f"{profile.name!r} of {owner.name}" for owner, profile in found)
        raise PluginError(
            f"{len(found)} plugins claim this machine's device: {names}. Say which with "
            "VLLM_FL_PLATFORM=<name>, or leave one out with VLLM_FL_PLUGINS.",
            plugin=found[1][0].plugin,
            distribution=str(found[1][0].distribution),
        )
    if name is not None and verdicts and not found:
        owner, _, why = verdicts[0]
        raise PluginError(
            f"VLLM_FL_PLATFORM={name} asks for the device of {owner}, which says that it is not "
            f"here: {why}. Unset VLLM_FL_PLATFORM to run on what vLLM finds itself.",
            plugin=owner.plugin,
            distribution=str(owner.distribution),
        )
    return found[0][1] if found else None


def rivals() -> tuple[str, ...]:
    """Other distributions that own what is ours: vLLM's plugin name `fl`, or vllm-plugin-FL.

    Returns:
        One sentence for each, with the pip line that ends it.
    """
    from importlib_metadata import PackageNotFoundError, distribution, entry_points

    names = {
        identity(entry.dist)[0]
        for group in ENGINE_GROUPS
        for entry in entry_points(group=group, name="fl")
        if entry.dist is not None and canonical(identity(entry.dist)[0]) != CORE
    }
    try:
        names.add(identity(distribution("vllm-plugin-fl"))[0])
    except PackageNotFoundError:
        pass
    unique = {canonical(name): name for name in names}
    return tuple(
        f"{name} owns vLLM's plugin name 'fl' or the import name 'vllm_fl' too; only one of the "
        f"two can work: pip uninstall -y {name} && pip install --force-reinstall --no-deps {CORE}"
        for name in sorted(unique.values())
    )


def identity(dist: Any) -> tuple[str, str | None, str]:
    """A distribution's name and version, also where its METADATA is gone.

    Args:
        dist: a `Distribution` of `installed`, importlib.metadata or importlib_metadata.

    Returns:
        (name, version, what is wrong with its metadata). Half uninstalled, a distribution may keep
        its entry points without METADATA; name and version are then those of its folder.
    """
    try:
        name, version = dist.name, dist.version
    except Exception:  # without METADATA: releases of importlib_metadata raise or answer None
        name = version = None
    if name:
        return name, version, ""
    # There is no public way to the folder's name; only distributions in folders get here.
    folder = str(getattr(dist, "_path", "unknown"))
    stem, _, _ = folder.rpartition("/")[2].rpartition(".")
    name, _, version = stem.partition("-")
    problem = f"{folder} has no METADATA: it is half uninstalled, and pip does not see it"
    return canonical(name), version or None, problem


def _module_loader(name: str) -> Callable[[], ModuleType]:
    return lambda: import_module(name)


def _raising(problem: str) -> Callable[[], object]:
    def load() -> object:
        raise FileNotFoundError(problem)

    return load
