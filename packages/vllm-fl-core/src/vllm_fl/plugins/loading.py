"""Load the plugins that were found, each in isolation.

pluggy checks the hooks and collects their results while a process starts; it is never on a call
path. Each plugin has a plugin manager of its own, so that a broken one does not affect the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import pluggy

from ..contracts.binding import Binding, Contract
from ..contracts.spec import unserved
from ..errors import PluginError
from ..logs import get_logger
from ..text import clean
from . import hookspecs
from .calling import ENDED, contained, whose
from .declared import check_api, check_kind, check_settings, forms_of, kernels_of, verifies_of
from .discovery import Found, module_of, remedy_for, select_allowed
from .hookspecs import PROJECT
from .installed import CORE
from .plugin import Owner, Plugin, Status
from .reserved import OPS, brings_ops, reservation
from .snapshot import RegistrySnapshot
from .types import (
    AttentionImpl,
    CommunicatorImpl,
    Impl,
    LayerImpl,
    OpImpl,
    SettingSpec,
)

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


def load(
    registry: Registry,
    found: Sequence[Found],
    *,
    only: Collection[str] | None = None,
    variables: Collection[str] = (),
) -> tuple[Plugin, ...]:
    """Load plugins into `registry`, each in isolation.

    Extensions of other distributions than `EXTENDERS` are refused. An (op, id) that two of
    them claim, or that is reserved for another one, is loaded from nobody but the one that it is
    reserved for; their other implementations stay. A module that the user names is left out where
    an entry point that is loaded leads to it: it is one plugin.

    Args:
        registry: what they register into. A plugin that fails leaves nothing in it.
        found: the plugins, in the order in which they are loaded.
        only: the distributions to load, beside the modules that were named, and the contracts that
            these need (`select_allowed`); None loads all.
        variables: the variables and keys of core's own settings, which no plugin may declare.
    """
    allowed = select_allowed(found, only)
    reached = {module_of(f.target) for f in allowed if f.owner.distribution is not None}
    found = [f for f in found if f.owner.distribution is not None or f.target not in reached]
    names = [f.owner.distribution for f in allowed if f.owner.distribution and f.kind == "backend"]
    todos = {each.owner: remedy_for(each, names) for each in found}
    brought: list[tuple[Plugin, list[Any]]] = []
    for candidate in found:
        owner = candidate.owner
        if candidate not in allowed:
            refusal = candidate.refusal
            status: Status = "disabled" if refusal is None else "failed"
            left_out = Plugin(owner, candidate.target, status, error=refusal, kind=candidate.kind)
            brought.append((left_out, []))
            continue
        before = _variables()
        plugin, impls = _bring(candidate, registry, todos[owner])
        if changed := sorted({name for name, _ in before ^ _variables()}):
            names = ", ".join(map(clean, changed))
            log.warning("%s set %s, which are the user's settings. [FL214]", owner.who, names)
        brought.append((replace(plugin, kind=candidate.kind), impls))
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
    verifies = False
    impls: list[Any] = []
    specs: list[Any] = []
    contracts: list[tuple[Contract, Binding]] = []
    manager = None
    try:
        if (ended := ENDED.get(whose(owner))) is not None:
            raise owner.error(f" failed: {ended}. {todo}")
        with contained(owner, "the import", todo, own):
            plugin = found.load()
            hooks, old_form = forms_of(plugin)
            check_kind(found.kind, hooks)
            check_api(plugin)
            verifies = verifies_of(plugin, hooks)
            owner = replace(owner, kernels=kernels_of(plugin))
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
                check_settings(specs)
                contracts = [(c, _binding(c)) for c in _results(manager, "contracts")]
    except PluginError as error:
        return Plugin(owner, found.target, "failed", hooks, error=error, verifies=verifies), []
    plugin = Plugin(
        owner,
        found.target,
        "ok",
        hooks,
        manager=manager,
        settings=tuple(specs),
        contracts=tuple(contracts),
        verifies=verifies,
    )
    return plugin, impls


def _package(target: str) -> str:
    """The package that a plugin's entry point is in: `acme` of `acme.plugin:Plugin`."""
    return module_of(target).partition(".")[0]


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
            if any(map(brings_ops, claimants)):
                if not brings_ops(plugin.owner):
                    why = f"{OPS} has this op; give yours another name"
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


def _variables() -> set[tuple[str, str]]:
    return {item for item in os.environ.items() if item[0].startswith("VLLM_FL_")}


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
