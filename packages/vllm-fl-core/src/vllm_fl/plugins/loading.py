"""Discover the installed plugins and load each in isolation.

pluggy checks the hooks and collects their results while a process starts; it is never on a call
path. Each plugin has a plugin manager of its own, so that a broken one does not affect the others.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from inspect import getattr_static
from typing import Any, NamedTuple, NoReturn, Protocol

import pluggy

from ..contracts.binding import Binding, Contract
from ..contracts.spec import unserved
from ..errors import PluginError
from ..logs import get_logger
from ..text import clean, nearest
from . import hookspecs
from .calling import ENDED, contained, whose
from .hookspecs import HOOK_API, PROJECT
from .installed import CORE, canonical, entry_points, identity, required_by
from .plugin import Owner, Plugin, Status
from .reserved import brings_ops, op_holder, reservation
from .snapshot import RegistrySnapshot
from .types import (
    PLUGIN_KEY,
    AttentionImpl,
    CommunicatorImpl,
    Impl,
    LayerImpl,
    OpImpl,
    SettingSpec,
)

GROUP = "vllm_fl.plugin"
CONTRACTS = "vllm_fl.contracts"
"""The group of plugins that bring contracts and nothing else. They are data: what is allowed to
load brings along those that it requires."""

OLD_NAMES = ("register_builtins", "vllm_fl_register", "register")

RETURNED = {
    "register_ops": OpImpl,
    "attention_backend": AttentionImpl,
    "communicator": CommunicatorImpl,
    "layers": LayerImpl,
    "settings": SettingSpec,
    "contracts": Contract,
}
"""Hook -> what it returns an iterable of."""

log = get_logger("plugins")


class Registry(Protocol):
    """The registry that plugins are loaded into; `OpRegistry` describes each method."""

    plugins: tuple[Plugin, ...]

    def snapshot(self) -> RegistrySnapshot: ...

    def collector(self) -> Any: ...

    def register_many(self, impls: Iterable[Impl], owner: Owner) -> None: ...

    def add_contract(self, contract: Contract, binding: Binding, owner: Owner) -> None: ...

    def remove(self, owner: Owner) -> None: ...


@dataclass(frozen=True)
class Found:
    """An entry point, or a module from VLLM_FL_PLUGIN_MODULES, not yet loaded."""

    owner: Owner
    target: str
    load: Callable[[], object]
    is_data: bool = False
    """Whether it brings contracts and nothing else, as its group says."""
    requires: frozenset[str] = frozenset()
    """The distributions that its own requires."""


class Refused(NamedTuple):
    """A contract, or an implementation, that is not loaded.

    Attributes:
        op: the op.
        why: what is said of it.
        kind: as which error.
        impl: the implementation's id.
    """

    op: str
    why: str
    kind: type[PluginError] = PluginError
    impl: str | None = None


def discover(modules: Iterable[str] = ()) -> tuple[Found, ...]:
    """The installed plugins, by distribution name, then the modules named by the user.

    Reads metadata only; nothing is imported.
    """
    found = []
    for entry in entry_points(GROUP, CONTRACTS):
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
        found.append(Found(owner, entry.value, load, entry.group == CONTRACTS, requires))
    found.sort(key=lambda f: (canonical(f.owner.distribution or ""), f.owner.plugin, f.target))
    unique: dict[tuple[str | None, str, str], Found] = {}
    for f in found:  # one distribution may lie on the path twice, as an editable install does
        unique.setdefault((f.owner.distribution, f.owner.plugin, f.target), f)
    named = (Found(Owner(plugin=name), name, partial(import_module, name)) for name in modules)
    return (*unique.values(), *named)


def load(
    registry: Registry,
    found: Sequence[Found],
    *,
    only: Collection[str] | None = None,
    variables: Collection[str] = (),
) -> tuple[Plugin, ...]:
    """Load plugins into `registry`, each in isolation.

    An (op, id) that two of them claim, or that is reserved for another one, is loaded from nobody
    but the one that it is reserved for; their other implementations stay. A module that the user
    names is left out where an entry point that is loaded leads to it: it is one plugin.

    Args:
        registry: what they register into. A plugin that fails leaves nothing in it.
        found: the plugins, in the order in which they are loaded.
        only: the distributions to load, beside the modules that were named, and the contracts that
            these need (`_allowed`); None loads all.
        variables: the variables and keys of core's own settings, which no plugin may declare.
    """
    allowed = _allowed(found, only)
    reached = {_module(f.target) for f in allowed if f.owner.distribution is not None}
    found = [f for f in found if f.owner.distribution is not None or f.target not in reached]
    names = [f.owner.distribution for f in allowed if f.owner.distribution and not f.is_data]
    todos = {each.owner: _todo(each, names) for each in found}
    brought: list[tuple[Plugin, list[Any]]] = []
    for candidate in found:
        owner = candidate.owner
        if candidate not in allowed:
            disabled = Plugin(owner, candidate.target, "disabled", is_data=candidate.is_data)
            brought.append((disabled, []))
            continue
        before = dict(os.environ)
        plugin, impls = _bring(candidate, registry, todos[owner])
        remarks = _undo(before, owner)
        brought.append((replace(plugin, remarks=remarks, is_data=candidate.is_data), impls))
    brought = _without_clashes(registry, brought, variables)
    refused = _add_contracts(registry, [plugin for plugin, _ in brought])
    told = [todos[each.owner] for each in found]  # a loaded plugin's owner knows its kernels, too
    claims: dict[tuple[str, str], list[Owner]] = {}
    for plugin, impls in brought:
        for key in dict.fromkeys(map(_key, impls)):
            if key is not None:
                claims.setdefault(key, []).append(plugin.owner)
    loaded = tuple(
        _register(registry, plugin, impls, claims, why, todo) if plugin.status == "ok" else plugin
        for (plugin, impls), why, todo in zip(brought, refused, told, strict=True)
    )
    registry.plugins += loaded
    return loaded


def _allowed(found: Sequence[Found], only: Collection[str] | None) -> list[Found]:
    """Those that may load: what the user names, and the contracts that come along.

    Contracts alone are data. They come along with what is named and requires them, and those of
    this project with whatever is named. Where nothing is named none of them is needed.
    """
    if only is None:
        return [*found]
    names = {canonical(name) for name in only}

    def is_named(each: Found) -> bool:
        # A module has no distribution: VLLM_FL_PLUGIN_MODULES has asked for it by name already.
        return each.owner.distribution is None or canonical(each.owner.distribution) in names

    allowed = [each for each in found if is_named(each)]
    if only or allowed:
        allowed += [f for f in found if f.is_data and brings_ops(f.owner) and f not in allowed]
    for each in allowed:  # grows while it is walked: contracts may require contracts
        allowed += [
            other
            for other in found
            if other.is_data
            and other not in allowed
            and canonical(other.owner.distribution or "") in each.requires
        ]
    return allowed


def _todo(found: Found, allowed: Iterable[str]) -> str:
    """What a failure at loading is followed by: how to do without this plugin.

    Args:
        found: the plugin.
        allowed: the distributions whose plugins are loaded, but for those of contracts alone.
    """
    owner = found.owner
    if found.is_data:
        return "Reinstall it: no engine runs an implementation of an op that has no contract."
    if owner.distribution is None:
        return "No other plugin needs it: mend it, or take it out of VLLM_FL_PLUGIN_MODULES."
    mine = canonical(owner.distribution)
    others = sorted({clean(name) for name in allowed if canonical(name) != mine})
    told = f"{','.join(others)} (all others)" if others else "'' (there is no other)"
    return f"No other plugin needs it: reinstall it, or leave it out with VLLM_FL_PLUGINS={told}."


def _failed(registry: Registry, plugin: Plugin, error: PluginError, **fields: Any) -> Plugin:
    """The same plugin with this error, and nothing of it left."""
    registry.remove(plugin.owner)
    return replace(
        plugin, status="failed", error=error, manager=None, settings=(), contracts=(), **fields
    )


def _without_clashes(
    registry: Registry, brought: Iterable[tuple[Plugin, list[Any]]], taken: Collection[str]
) -> list[tuple[Plugin, list[Any]]]:
    """The same, where a plugin that declares a setting of core's or of another one has failed."""
    holders = dict.fromkeys(taken, CORE)
    checked = []
    for plugin, impls in brought:
        names = [name for spec in plugin.settings for name in (spec.key, *spec.variables)]
        clash = next((name for name in names if name in holders), None)
        if clash is None:
            holders |= dict.fromkeys(names, str(plugin.owner))
            checked.append((plugin, impls))
            continue
        error = plugin.owner.error(
            f": its setting {clash!r} is {clean(holders[clash])}'s, too; uninstall one of the two, "
            "or name the ones to load in VLLM_FL_PLUGINS."
        )
        checked.append((_failed(registry, plugin, error), []))
    return checked


def _bring(found: Found, registry: Registry, todo: str) -> tuple[Plugin, list[Any]]:
    """Import one plugin and ask it for its implementations; nothing is registered yet."""
    owner = found.owner
    own = _package(found.target)
    hooks: tuple[str, ...] = ()
    impls: list[Any] = []
    specs: list[Any] = []
    contracts: list[tuple[Contract, Binding]] = []
    manager = None
    try:
        if (ended := ENDED.get(whose(owner))) is not None:
            raise owner.error(f" failed: {ended}. {todo}")
        with contained(owner, "the import", todo, own):
            plugin = found.load()
            hooks, old_form = _forms(plugin)
            if found.is_data and hooks != ("contracts",):
                raise TypeError(
                    f"the group {CONTRACTS} is for plugins that bring contracts alone, and it "
                    f"implements {', '.join(hooks)}: name it in the group {GROUP}"
                )
            _check_api(plugin)
            owner = replace(owner, kernels=_kernels(plugin))
        with contained(owner, "the registration", todo, own):
            if old_form is not None:
                impls = _run_old_form(old_form, registry)
            else:
                manager = pluggy.PluginManager(PROJECT)
                manager.add_hookspecs(hookspecs)
                manager.register(plugin, name=str(owner))
                manager.check_pending()
                for hook in ("register_ops", "attention_backend", "communicator", "layers"):
                    impls += _results(manager, hook)
                specs = _results(manager, "settings")
                _check_settings(specs)
                contracts = [(c, _binding(c)) for c in _results(manager, "contracts")]
    except PluginError as error:
        return Plugin(owner, found.target, "failed", hooks, error=error), []
    plugin = Plugin(
        owner,
        found.target,
        "ok",
        hooks,
        manager=manager,
        settings=tuple(specs),
        contracts=tuple(contracts),
    )
    return plugin, impls


def _module(target: str) -> str:
    """The module that a plugin's entry point is in: `acme.plugin` of `acme.plugin:Plugin`."""
    return target.partition(":")[0].strip()


def _package(target: str) -> str:
    """The package that a plugin's entry point is in: `acme` of `acme.plugin:Plugin`."""
    return _module(target).partition(".")[0]


def _binding(contract: object) -> Binding:
    """The targets in vLLM of an op that a plugin brings."""
    if not isinstance(contract, Contract):
        raise TypeError(f"contracts returned {contract!r}; expected Contract")
    if contract.binding is None:
        return Binding()
    binding = getattr(import_module(contract.binding), "BINDING", None)
    if not isinstance(binding, Binding):
        raise TypeError(
            f"the module {contract.binding!r} of the op {contract.name!r} has {binding!r} for its "
            "BINDING; expected a Binding"
        )
    if binding.targets and contract.spec.served is unserved:
        raise ValueError(
            f"the op {contract.name!r} has places in vLLM, and its contract no `served`: a start "
            "could not try a model's calls. Give it one"
        )
    return binding.routed(contract.spec)


def _add_contracts(registry: Registry, plugins: Sequence[Plugin]) -> list[list[Refused]]:
    """Register the ops that plugins bring; for each plugin, which were refused and why.

    An op that two of them bring is loaded from neither. A target in vLLM that two ops name is that
    of the first, and those of this project come before all others.
    """
    claims: dict[str, list[Owner]] = {}
    for plugin in plugins:
        for contract, _ in plugin.contracts:
            if not op_holder(contract.name, plugin.owner):
                claims.setdefault(contract.name, []).append(plugin.owner)
    first = registry.snapshot()
    refused: list[list[Refused]] = [[] for _ in plugins]
    in_turn = sorted(
        zip(plugins, refused, strict=True), key=lambda each: not brings_ops(each[0].owner)
    )
    for plugin, of_plugin in in_turn:
        for contract, binding in plugin.contracts:
            name = contract.name
            if (first.contracts.get(name), first.authors.get(name)) == (
                contract.spec,
                plugin.owner,
            ):
                continue  # a script's registry began with it
            claimants = claims.get(name, [])
            why, kind = registry.snapshot().objection(name, binding)
            if holder := op_holder(name, plugin.owner):
                why = f"{holder} has this op; give yours another name"
            elif len(claimants) > 1:
                others = [clean(str(each)) for each in claimants if each != plugin.owner]
                why, kind = (
                    f"{', '.join(others) or 'the same plugin'} brings one of this name too, and it "
                    "is loaded from none of them; uninstall all but one, or name the ones to load "
                    "in VLLM_FL_PLUGINS",
                    PluginError,
                )
            if why:
                of_plugin.append(Refused(name, f"the contract of op {name!r}: {why}", kind))
            else:
                registry.add_contract(contract, binding, plugin.owner)
    return refused


def _register(
    registry: Registry,
    plugin: Plugin,
    impls: list[Any],
    claims: Mapping[tuple[str, str], Sequence[Owner]],
    refused: Sequence[Refused],
    todo: str,
) -> Plugin:
    """Register what one plugin brings, without the ids that are not its own.

    Args:
        registry: what it is registered into. Its contracts are there already.
        plugin: the plugin.
        impls: its implementations.
        claims: (op, impl id) -> who brings it.
        refused: which of its contracts are not loaded, and why.
        todo: what to do where the registration fails.
    """
    owner = plugin.owner
    whys = {key: _not_its_own(key, owner, claims[key]) for key in filter(None, map(_key, impls))}
    kept = [impl for impl in impls if (key := _key(impl)) is None or not whys[key]]
    lost = [
        Refused(op, f"{op} implementation {impl_id!r}: {why}", impl=impl_id)
        for (op, impl_id), why in whys.items()
        if why
    ]
    claimed = tuple(dict.fromkeys(impl_id for _, impl_id in whys))
    error = None
    if every := (*refused, *lost):
        first = (*lost, *refused)[0]
        error = owner.error(
            f": not loaded: {'; '.join(each.why for each in every)}. What else it brings is "
            "loaded.",
            kind=every[0].kind,
            op=first.op,
            impl=first.impl,
        )
    try:
        with contained(owner, "the registration", todo, _package(plugin.target)):
            registry.register_many(kept, owner)
    except PluginError as failure:
        return _failed(registry, plugin, failure, claims=claimed)
    is_left = bool(kept) or len(refused) < len(plugin.contracts)
    status: Status = "ok" if error is None else "partial" if is_left else "failed"
    return replace(
        plugin,
        status=status,
        claims=claimed,
        error=error,
        manager=plugin.manager if status != "failed" else None,
        lost=tuple((each.op, str(each.impl)) for each in lost),
    )


def _key(impl: object) -> tuple[str, str] | None:
    if isinstance(impl, Impl) and isinstance(impl.op_name, str):
        return impl.op_name, impl.impl_id
    return None  # the registry refuses it, by name


def _not_its_own(key: tuple[str, str], owner: Owner, claimants: Sequence[Owner]) -> str:
    """Why `owner` may not register this (op, id); empty when it may."""
    reserved = reservation(key[1], owner)
    if reserved:
        return f"{reserved}; leave {owner.name} out with VLLM_FL_PLUGINS, or uninstall it"
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


def _undo(before: Mapping[str, str], owner: Owner) -> tuple[str, ...]:
    """Take back what a plugin did to the VLLM_FL_* variables; one sentence about it, or none."""
    after = dict(os.environ)
    changed = sorted(
        name
        for name in {*before, *after}
        if name.startswith("VLLM_FL_") and before.get(name) != after.get(name)
    )
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


def _check_settings(specs: Sequence[Any]) -> None:
    """Check what one plugin declares; what it shares with others is checked when all are known."""
    for spec in specs:
        if not isinstance(spec, SettingSpec):
            raise TypeError(f"settings returned {spec!r}; expected SettingSpec")
        if spec.in_file and not re.fullmatch(PLUGIN_KEY, spec.key):
            raise ValueError(
                f"a file may have its setting {spec.key!r}, whose key must then begin with "
                "flagos_, reference_ or vendor_<vendor>_"
            )
    settings = Counter(spec.key for spec in specs)
    variables = Counter(name for spec in specs for name in spec.variables)
    for name in (name for counts in (settings, variables) for name, n in counts.items() if n > 1):
        raise ValueError(f"it declares {name!r} twice")
    blacklists = {spec.key: spec for spec in specs if spec.names and spec.default is not None}
    for spec in specs:
        if not spec.excludes:
            continue
        if spec.excludes not in blacklists:
            raise ValueError(
                f"its setting {spec.key!r} excludes {spec.excludes!r}, which is no list of its own "
                "with a tuple as its default"
            )
        if blacklists[spec.excludes].in_file is not spec.in_file:
            raise ValueError(
                f"its settings {spec.key!r} and {spec.excludes!r} exclude each other: a file may "
                "have both or neither"
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
        slip = meant[0] if meant else nearest(wanted, known)
        suggestion = f" Did you mean {slip!r}?" if slip else ""
        told.append(
            f"VLLM_FL_PLUGINS names {name!r}, which is not an installed distribution with a "
            f"plugin: it loads nothing.{suggestion} Installed are "
            f"{', '.join(sorted(known)) or 'none'}."
        )
    return tuple(told)


def named_twice(plugins: Iterable[Plugin], modules: Collection[str]) -> tuple[str, ...]:
    """One sentence for each of VLLM_FL_PLUGIN_MODULES that is loaded by an entry point anyhow."""
    return tuple(
        f"VLLM_FL_PLUGIN_MODULES names {_module(plugin.target)!r}, to which the entry point "
        f"{clean(plugin.owner.plugin)!r} of {clean(plugin.owner.name)} leads already: it is one "
        "plugin, loaded once, by the entry point."
        for plugin in plugins
        if plugin.owner.distribution is not None
        and plugin.status != "disabled"
        and _module(plugin.target) in modules
    )


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


def _results(manager: pluggy.PluginManager, hook: str) -> list[Any]:
    """What one plugin's hook returns, as a list. A generator runs to its end here."""
    impls: list[Any] = []
    for result in getattr(manager.hook, hook)():
        if isinstance(result, str | bytes | dict) or not isinstance(result, Iterable):
            raise TypeError(
                f"{hook} returned {type(result).__name__}; expected an iterable of "
                f"{RETURNED[hook].__name__}"
            )
        impls += result
    return impls


def _run_old_form(function: Callable[[Any], object], registry: Registry) -> list[Impl]:
    collector = registry.collector()
    function(collector)
    if not collector.impls:
        raise TypeError(
            f"{getattr(function, '__qualname__', function)!r} was called with the registry, as the "
            "older form is, and registered nothing: point the entry point at a module whose "
            "functions carry @hookimpl, or register what it brings"
        )
    found: list[Impl] = collector.impls
    return found


def _fail(problem: str) -> NoReturn:
    raise FileNotFoundError(problem)
