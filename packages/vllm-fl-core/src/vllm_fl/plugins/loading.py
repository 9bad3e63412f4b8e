"""Load the plugins that were found, each in isolation.

Hooks are called while a process starts, never on a call path.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from ..contracts import OPS
from ..contracts.binding import Binding, Contract
from ..contracts.spec import unserved
from ..errors import PluginError
from ..logs import get_logger
from ..text import clean
from .calling import ENDED, contained, whose
from .declared import (
    OLD_FORM,
    check_api,
    check_kind,
    check_settings,
    hooks_of,
    kernels_of,
    verifies_of,
)
from .discovery import Found, module_of, remedy_for, select_allowed
from .installed import CORE
from .plugin import Owner, Plugin, Status
from .reserved import brings_ops, holder_of, reservation
from .snapshot import RegistrySnapshot
from .types import AttentionImpl, CommunicatorImpl, Impl, LayerImpl, OpImpl, SettingSpec

IMPLS = {
    "register_ops": OpImpl,
    "attention_backend": AttentionImpl,
    "communicator": CommunicatorImpl,
    "layers": LayerImpl,
}
"""The hooks for implementations -> what each returns an iterable of."""

Claims = dict[tuple[str, str], list[Owner]]
"""(op, impl id), or (op, "") for its contract -> the plugins that have it."""

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
    """A contract or an implementation that is not loaded.

    Attributes:
        op: the op.
        impl: the id of the implementation; None for the contract.
        why: the reason.
        kind: the class of the error.
    """

    op: str
    impl: str | None
    why: str
    kind: type[PluginError] = PluginError


@dataclass
class Candidate:
    """A plugin that is imported, and nothing of it registered.

    Args:
        plugin: the plugin.
        impls: its implementations.
        todo: how to do without it.
        refused: its contracts and implementations that are not loaded.
    """

    plugin: Plugin
    impls: list[Any] = field(default_factory=list)
    todo: str = ""
    refused: list[Refused] = field(default_factory=list)


def load(
    registry: Registry,
    found: Sequence[Found],
    *,
    only: Collection[str] | None = None,
    variables: Collection[str] = (),
) -> tuple[Plugin, ...]:
    """Load plugins into `registry`, each in isolation.

    An (op, id) or a contract of several plugins is loaded from none of them, except for the one
    that it is reserved for; their other implementations are loaded. A module that the user names
    is left out if the entry point of a loaded plugin has it.

    Args:
        registry: the registry. A plugin that fails leaves nothing in it.
        found: the plugins, in the order in which they are loaded.
        only: the distributions to load (`select_allowed`); None loads all.
        variables: the variables and keys of core's own settings, which no plugin may declare.
    """
    allowed = select_allowed(found, only)
    reached = {module_of(f.target) for f in allowed if f.owner.distribution is not None}
    names = [f.owner.distribution for f in allowed if f.owner.distribution and f.kind == "backend"]
    holders = dict.fromkeys(variables, CORE)
    candidates: list[Candidate] = []
    for each in found:
        if each.owner.distribution is None and each.target in reached:
            continue
        if each in allowed:
            before = _variables()
            candidates.append(_import(each, registry, remedy_for(each, names), holders))
            if changed := sorted({name for name, _ in before ^ _variables()}):
                told = f"{each.owner.who} set {', '.join(map(clean, changed))}"
                log.warning("%s, which are the user's. [FL214]", told)
        else:
            error = each.refusal
            status: Status = "disabled" if error is None else "failed"
            plugin = Plugin(each.owner, each.target, status, error=error, kind=each.kind)
            candidates.append(Candidate(plugin))
    claims: Claims = {}
    for candidate in candidates:
        ops = [(contract.name, "") for contract, _ in candidate.plugin.contracts]
        for key in dict.fromkeys((*ops, *filter(None, map(_key, candidate.impls)))):
            claims.setdefault(key, []).append(candidate.plugin.owner)
    for candidate in sorted(candidates, key=lambda each: not brings_ops(each.plugin.owner)):
        _add_contracts(registry, candidate, claims)
    loaded = tuple(_register(registry, candidate, claims) for candidate in candidates)
    registry.plugins += loaded
    return loaded


def _variables() -> set[tuple[str, str]]:
    return {item for item in os.environ.items() if item[0].startswith("VLLM_FL_")}


def _import(found: Found, registry: Registry, todo: str, holders: dict[str, str]) -> Candidate:
    """Import one plugin, and collect its implementations, contracts and settings."""
    plugin = Plugin(found.owner, found.target, "failed", kind=found.kind)
    own = module_of(found.target).partition(".")[0]
    impls: list[Any] = []
    try:
        if (ended := ENDED.get(whose(found.owner))) is not None:
            raise found.owner.error(f" failed: {ended}. {todo}")
        with contained(found.owner, "the import", todo, own):
            module = found.load()
            check_api(module)
            hooks = hooks_of(module)
            plugin = replace(plugin, hooks=hooks)
            check_kind(found.kind, hooks)
            plugin = replace(plugin, verifies=verifies_of(module, hooks))
            owner = replace(found.owner, kernels=kernels_of(module))
        with contained(owner, "the registration", todo, own):
            if OLD_FORM in hooks:
                impls = _run_old_form(hooks[OLD_FORM], registry)
            for hook, kind in IMPLS.items():
                impls += _results(hooks, hook, kind)
            specs = _results(hooks, "settings", SettingSpec)
            contracts = [(c, _binding(c)) for c in _results(hooks, "contracts", Contract)]
            check_settings(specs, owner, holders)
    except PluginError as error:
        return Candidate(replace(plugin, error=error))
    plugin = replace(plugin, settings=tuple(specs), contracts=tuple(contracts))
    return Candidate(replace(plugin, owner=owner, status="ok"), impls, todo)


def _results(hooks: Mapping[str, Callable[..., Any]], hook: str, kind: type) -> list[Any]:
    """The results of a hook that returns an iterable. A generator runs to its end here."""
    found: list[Any] = []
    for result in hooks[hook]() if hook in hooks else ():
        if isinstance(result, str | bytes | dict) or not isinstance(result, Iterable):
            raise TypeError(
                f"{hook} returned {type(result).__name__}; expected an iterable of {kind.__name__}"
            )
        found += result
    return found


def _run_old_form(function: Callable[[Any], object], registry: Registry) -> list[Impl]:
    collector = registry.collector()
    function(collector)
    if not collector.impls:
        raise TypeError(
            f"{getattr(function, '__qualname__', function)!r} was called with the registry, as the "
            "older form is, and registered nothing: point the entry point at a module whose "
            "functions carry @hookimpl, or register its implementations"
        )
    found: list[Impl] = collector.impls
    return found


def _binding(contract: object) -> Binding:
    """The targets in vLLM of a plugin's op."""
    if not isinstance(contract, Contract):
        raise TypeError(f"contracts returned {contract!r}; expected Contract")
    if contract.binding is None:
        return Binding()
    binding = getattr(import_module(contract.binding), "BINDING", None)
    if isinstance(binding, Mapping):
        binding = binding.get(contract.name)
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


def _add_contracts(registry: Registry, candidate: Candidate, claims: Claims) -> None:
    """Register the contracts of one plugin.

    A target in vLLM that two ops name belongs to the first.
    """
    owner = candidate.plugin.owner
    for contract, binding in candidate.plugin.contracts:
        name, known = contract.name, registry.snapshot()
        if known.contracts.get(name) is contract.spec and known.authors.get(name) == owner:
            continue  # a script's registry began with it
        why, kind = _clash(owner, claims[name, ""], OPS), PluginError
        if not why:
            why, kind = known.objection(name, binding)
        if why:
            why = f"the contract of op {name!r}: {why}"
            candidate.refused.append(Refused(name, None, why, kind))
        else:
            registry.add_contract(contract, binding, owner)


def _register(registry: Registry, candidate: Candidate, claims: Claims) -> Plugin:
    """Register the implementations of one plugin. The contracts of all are registered already."""
    plugin, refused = candidate.plugin, candidate.refused
    if plugin.status != "ok":
        return plugin
    owner, kept = plugin.owner, []
    for impl in candidate.impls:
        op, impl_id = _key(impl) or ("", "")
        why = reservation(impl_id, owner)
        if why:
            why = f"{why}; leave {owner.name} out with VLLM_FL_PLUGINS, or uninstall it"
        elif impl_id:
            others = [each for each in claims[op, impl_id] if not reservation(impl_id, each)]
            why = _clash(owner, others, holder_of(impl_id))
        if why:
            why = f"{op} implementation {impl_id!r}: {why}"
            refused.append(Refused(op, impl_id, why))
        else:
            kept.append(impl)
    try:
        own = module_of(plugin.target).partition(".")[0]
        with contained(owner, "the registration", candidate.todo, own):
            registry.register_many(kept, owner)
    except PluginError as failure:
        registry.remove(owner)
        lost = tuple(filter(None, map(_key, candidate.impls)))
        return replace(plugin, status="failed", error=failure, settings=(), contracts=(), lost=lost)
    if not refused:
        return plugin
    first = next((each for each in refused if each.impl), refused[0])
    error = owner.error(
        f": not loaded: {'; '.join(each.why for each in refused)}. What else it brings is loaded.",
        kind=refused[0].kind,
        op=first.op,
        impl=first.impl,
    )
    is_left = bool(kept) or sum(each.impl is None for each in refused) < len(plugin.contracts)
    lost = tuple((each.op, each.impl) for each in refused if each.impl)
    return replace(plugin, status="partial" if is_left else "failed", error=error, lost=lost)


def _key(impl: object) -> tuple[str, str] | None:
    if isinstance(impl, Impl) and isinstance(impl.op_name, str):
        return impl.op_name, impl.impl_id
    return None  # the registry refuses it, by name


def _clash(owner: Owner, claimants: Sequence[Owner], holder: str | None) -> str:
    """The reason why `owner` may not have what several plugins claim; empty if it may.

    Args:
        owner: the plugin's owner.
        claimants: all that claim it.
        holder: the distribution that may have it.
    """
    others = [each for each in claimants if each != owner]
    if not others or owner.is_of(holder):
        return ""
    holders = [each for each in others if each.is_of(holder)]
    ending = "it is loaded from there" if holders else "it is loaded from none of them"
    return (
        f"{', '.join(clean(str(each)) for each in holders or others)} claims it too, and {ending}; "
        "uninstall all but one, or name the ones to load in VLLM_FL_PLUGINS"
    )
