"""Load the installed plugins, each in isolation. This never happens on a call path."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from importlib import import_module
from typing import Any

from ..contracts.binding import Binding, Contract
from ..contracts.spec import unserved
from ..errors import DuplicateError, PluginError
from ..logs import get_logger
from ..text import clean
from .calling import ENDED, contained, describe_owner
from .declared import IMPLS, OLD_FORM, check_settings, declare
from .discovery import ban_of, remedy_for, select_allowed
from .installed import CORE
from .plugin import ONE_OF_TWO, Owner, Plugin
from .reserved import FL_OPS, holder_of, reservation
from .setting import SettingSpec
from .types import Impl

Claims = dict[tuple[str, str], list[Owner]]
"""(op, impl id) of an implementation, or (op, "") of a contract -> the owners that provide it."""

log = get_logger("plugins")


def load(
    registry: Any,
    found: Sequence[Plugin],
    *,
    only: Collection[str] | None = None,
    variables: Collection[str] = (),
) -> tuple[Plugin, ...]:
    """Load plugins into `registry`, an `OpRegistry`, each in isolation. A plugin that fails has no
    effect on the registry. Plugins that provide the same contract or the same (op, id) fail, except
    the owner of a reserved op or id. A user's module is skipped if the entry point of an allowed
    plugin is in it.

    Args:
        only: the distributions to load (`select_allowed`); None loads all.
        variables: core's variables and keys, which plugins must not declare.
    """
    allowed = select_allowed(found, only)
    reached = {each.module for each in allowed if each.owner.distribution is not None}
    holders = dict.fromkeys(variables, CORE)
    plugins: list[Plugin] = []
    for each in found:
        if each.owner.distribution is None and each.target in reached:
            continue
        plugins.append(plugin := copy(each))
        plugin.todo = remedy_for(plugin, allowed)
        if each in allowed:
            before = _variables()
            _import(plugin, registry, holders)
            if changed := sorted({name for name, _ in before ^ _variables()}):
                remark = f"{plugin.owner.who} set {', '.join(map(clean, changed))}"
                log.warning("%s; only the user may set these. [FL214]", remark)
        elif (error := ban_of(plugin)) is not None:
            plugin.fail(error)
        else:
            plugin.status = "disabled"
    claims: Claims = {}
    for plugin in plugins:
        for key in plugin.claims:
            claims.setdefault(key, []).append(plugin.owner)
    by_turn = sorted(plugins, key=lambda each: not each.owner.is_of(FL_OPS))
    for plugin in [each for each in by_turn if each.is_loaded]:
        with _registering(registry, plugin):
            _add_contracts(registry, plugin, claims)
    for plugin in [each for each in plugins if each.is_loaded]:
        with _registering(registry, plugin):
            registry.register_many(plugin.impls, plugin.owner)
    registry.plugins += tuple(plugins)
    return tuple(plugins)


def _variables() -> set[tuple[str, str]]:
    return {item for item in os.environ.items() if item[0].startswith("VLLM_FL_")}


def _import(plugin: Plugin, registry: Any, holders: dict[str, str]) -> None:
    try:
        if (ended := ENDED.get(describe_owner(plugin.owner))) is not None:
            raise plugin.owner.error(f" failed: {ended}. {plugin.todo}")
        with contained(plugin, "the import"):
            declare(plugin, plugin.load())
            hooks = plugin.hooks
        with contained(plugin, "the registration"):
            impls = _run_old_form(hooks[OLD_FORM], registry) if OLD_FORM in hooks else []
            for hook, kind in IMPLS.items():
                impls += _results(hooks, hook, kind)
            specs = _results(hooks, "settings", SettingSpec)
            plugin.contracts = [(c, _binding(c)) for c in _results(hooks, "contracts", Contract)]
            check_settings(specs, plugin.owner, holders)
            plugin.impls, plugin.settings, plugin.status = impls, tuple(specs), "ok"
    except PluginError as error:
        plugin.fail(error)


@contextmanager
def _registering(registry: Any, plugin: Plugin) -> Iterator[None]:
    """Register a part of a plugin. If it fails, remove the whole plugin from the registry."""
    try:
        with contained(plugin, "the registration"):
            yield
    except PluginError as error:
        registry.remove(plugin.owner)
        plugin.fail(error)


def _results(hooks: Mapping[str, Callable[..., Any]], hook: str, kind: type) -> list[Any]:
    found: list[Any] = []
    for result in hooks[hook]() if hook in hooks else ():
        if isinstance(result, str | bytes | dict) or not isinstance(result, Iterable):
            raise TypeError(
                f"{hook} returned {type(result).__name__}; expected an iterable of {kind.__name__}"
            )
        found += result
    return found


def _run_old_form(function: Callable[[Any], object], registry: Any) -> list[Impl]:
    collector = registry.collector()
    function(collector)
    if not collector.impls:
        raise TypeError(
            f"{getattr(function, '__qualname__', function)!r} was called with the registry (the "
            "older form), but registered nothing; register its implementations, or use a module "
            "with @hookimpl functions as the entry point"
        )
    found: list[Impl] = collector.impls
    return found


def _binding(contract: object) -> Binding:
    if not isinstance(contract, Contract):
        raise TypeError(f"contracts returned {contract!r}; expected Contract")
    if contract.binding is None:
        return Binding()
    binding = getattr(import_module(contract.binding), "BINDING", None)
    if isinstance(binding, Mapping):
        binding = binding.get(contract.name)
    if not isinstance(binding, Binding):
        raise TypeError(
            f"BINDING of the module {contract.binding!r} is {binding!r} for the op "
            f"{contract.name!r}; expected a Binding"
        )
    if binding.targets and contract.spec.served is unserved:
        raise ValueError(
            f"the op {contract.name!r} has targets in vLLM, but its contract has no `served`, "
            "which verification of a model's calls needs"
        )
    return binding.routed(contract.spec)


def _add_contracts(registry: Any, plugin: Plugin, claims: Claims) -> None:
    """Register a plugin's contracts, if no other plugin owns its ops and ids."""
    owner = plugin.owner
    for op, impl_id in sorted(plugin.claims):
        holder = holder_of(impl_id) if impl_id else FL_OPS
        why = reservation(impl_id, owner)
        others = [o for o in claims[op, impl_id] if o != owner and not reservation(impl_id, o)]
        if not why and others and not owner.is_of(holder):
            named = [each for each in others if each.is_of(holder)] or others
            why = f"also provided by {', '.join(clean(str(each)) for each in named)}"
        if why:
            what = f"{op} implementation {impl_id!r}" if impl_id else f"the contract of op {op!r}"
            raise owner.error(
                f": {what} rejected: {why}. {ONE_OF_TWO if others else 'Rename it'}.",
                kind=DuplicateError if others else PluginError,
                op=op,
                impl=impl_id or None,
            )
    for contract, binding in plugin.contracts:
        known = registry.snapshot()
        is_known = known.contracts.get(contract.name) is contract.spec
        if not is_known or known.authors.get(contract.name) != owner:  # the registry of a script
            registry.add_contract(contract, binding, owner)
