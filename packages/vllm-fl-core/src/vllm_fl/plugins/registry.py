"""The registry: implementations and contracts by op, each with its owner."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache

from ..contracts import OpSpec
from ..contracts.binding import Binding, Contract
from ..contracts.targets import ATTENTION_BACKEND
from ..errors import DuplicateError, PluginError, TargetError
from ..logs import get_logger
from ..text import clean
from .answers import parameters_of
from .discovery import discover
from .installed import CORE
from .loading import load
from .plugin import ONE_OF_TWO, Owner, Plugin
from .reserved import reservation
from .signatures import fitted, from_older_form, shape
from .snapshot import EMPTY, RegistrySnapshot
from .types import ATTENTION, NAMED_CLASSES, Impl, OpImpl

log = get_logger("plugins")

SCRIPT = Owner(plugin="(registered by a script)")


class OpRegistry:
    """The registered implementations and contracts. Writes are atomic; reads take no lock.

    Args:
        first: the initial content. By default it is `known_contracts`, because a script's registry
            needs the ops.
    """

    def __init__(self, first: RegistrySnapshot | None = None) -> None:
        if first is None:
            first = known_contracts()
        self._lock = threading.Lock()
        self._listeners: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._first = self._snapshot = first
        self.plugins: tuple[Plugin, ...] = ()
        """All plugins that were passed to `load`, including failed and disabled ones."""

    def collector(self) -> Collector:
        """Return a registry with the current content, for a plugin of the older form."""
        return Collector(self)

    def snapshot(self) -> RegistrySnapshot:
        """Return the current content."""
        return self._snapshot

    def get_implementations(self, op: str) -> list[Impl]:
        """Return the implementations of `op`, ordered by impl id."""
        return [*self._snapshot.impls_by_op.get(op, ())]

    def get_implementation(self, op: str, impl_id: str) -> Impl | None:
        """Return the implementation of `op` with this id."""
        return next((i for i in self.get_implementations(op) if i.impl_id == impl_id), None)

    def list_operators(self) -> list[str]:
        """Return the ops that have an implementation."""
        return [*self._snapshot.impls_by_op]

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call this bound method after every change, as long as its object is alive."""
        others = [each for each in self._listeners if each() not in (None, listener)]
        self._listeners = [*others, weakref.WeakMethod(listener)]

    def _change(self, snapshot: RegistrySnapshot) -> None:
        self._snapshot = snapshot
        for reference in self._listeners:
            listener = reference()
            if listener is not None:
                listener()

    def register_impl(self, impl: Impl, owner: Owner = SCRIPT) -> None:
        """Add one implementation.

        Raises:
            PluginError: its (op, id) exists or is reserved, or its parameters differ from the
                contract.
        """
        self.register_many([impl], owner)

    def register_many(self, impls: Iterable[Impl], owner: Owner = SCRIPT) -> None:
        """Add several implementations, or none of them on an error. See `register_impl`."""
        with self._lock:
            by_op = {op: list(found) for op, found in self._snapshot.impls_by_op.items()}
            owners = dict(self._snapshot.owners)
            for each in impls:
                # `map` would end early if a plugin raised StopIteration.
                impl = _as_it_is_now(each, self._snapshot.contracts)
                if not isinstance(impl, Impl):
                    expected = "expected OpImpl or a class: AttentionImpl, CommunicatorImpl, "
                    expected += "LayerImpl, LinearKernelImpl, ExpertKernelImpl"
                    raise _refusal(owner, None, f"got {impl!r}; {expected}")
                key = (impl.op_name, impl.impl_id)
                # `load` decides which distribution may use the other reserved ids.
                if reserved := reservation(impl.impl_id, SCRIPT):
                    raise _refusal(owner, impl, reserved)
                if key in owners:
                    raise _refusal(
                        owner,
                        impl,
                        kind=DuplicateError,
                        problem=f"{impl.op_name} already has an implementation "
                        f"{impl.impl_id!r}, from {owners[key]}. "
                        + ("Use a different id" if owners[key] == owner else ONE_OF_TWO),
                    )
                spec = self._snapshot.contracts.get(impl.op_name)
                if isinstance(impl, OpImpl) and spec is None and impl.takes is not None:
                    raise _refusal(owner, impl, "`takes` requires an op with a contract")
                if isinstance(impl, OpImpl) and spec is not None and not impl.needs_layer:
                    _check_parameters(impl, spec, owner)
                by_op.setdefault(impl.op_name, []).append(impl)
                owners[key] = owner
            ordered = {
                op: tuple(sorted(found, key=lambda i: i.impl_id))
                for op, found in sorted(by_op.items())
            }
            self._change(replace(self._snapshot, impls_by_op=ordered, owners=owners))

    def add_contract(self, contract: Contract, binding: Binding, owner: Owner) -> None:
        """Add an op of a plugin.

        Raises:
            DuplicateError: another plugin has a contract of this name, or core reserves the name.
            TargetError: a target of its binding belongs to another op.
        """
        with self._lock:
            before, name = self._snapshot, contract.name
            _check_contract(before, name, binding, owner)
            specs = {**before.contracts, name: contract.spec}
            self._change(
                replace(
                    before,
                    contracts=dict(sorted(specs.items())),
                    bindings={**before.bindings, name: binding},
                    authors={**before.authors, name: owner},
                )
            )

    def remove(self, owner: Owner) -> None:
        """Remove everything that `owner` has registered."""
        with self._lock:
            before = self._snapshot
            owners = {key: each for key, each in before.owners.items() if each != owner}
            impls = {
                op: kept
                for op, found in before.impls_by_op.items()
                if (kept := tuple(i for i in found if (op, i.impl_id) in owners))
            }
            gone = {op for op, author in before.authors.items() if author == owner}
            contracts = {op: spec for op, spec in before.contracts.items() if op not in gone}
            bindings = {op: each for op, each in before.bindings.items() if op not in gone}
            authors = {op: author for op, author in before.authors.items() if op not in gone}
            self._change(RegistrySnapshot(impls, owners, contracts, bindings, authors))

    def clear(self) -> None:
        """Reset to the initial content."""
        with self._lock:
            self._change(self._first)


def _as_it_is_now(impl: Impl, specs: Mapping[str, OpSpec]) -> Impl:
    """Convert an implementation of the older form, or with fewer parameters than its contract."""
    if not isinstance(impl, OpImpl):
        return impl
    if impl.op_name == ATTENTION:
        return from_older_form(impl)
    spec = specs.get(impl.op_name)
    return impl if spec is None else fitted(impl, spec)


def _check_contract(known: RegistrySnapshot, op: str, binding: Binding, owner: Owner) -> None:
    what = f"the contract of op {op!r}"
    if op in known.contracts or op in NAMED_CLASSES:
        why = f"{what}: {known.authors.get(op, CORE)} has this op; rename yours"
        raise _refusal(owner, None, why, kind=DuplicateError)
    taken = {ATTENTION_BACKEND: ATTENTION}
    for other, bound in known.bindings.items():
        taken |= dict.fromkeys(bound.claims, other)
    for target in binding.claims:
        if (holder := taken.get(target, op)) != op:
            why = (
                f"{what}: {target} is already a target of op {holder!r} of "
                f"{clean(str(known.authors.get(holder, CORE)))}, and a target has only one op. "
                "Remove it from the binding, uninstall one of the two, or list the ones to load in "
                "VLLM_FL_PLUGINS"
            )
            raise _refusal(owner, None, why, kind=TargetError)


def _check_parameters(impl: OpImpl, spec: OpSpec, owner: Owner) -> None:
    """Check that the contract has the same parameters. Calls pass them by position and by name."""
    wanted = tuple(spec.signature.parameters.values())
    for what in ("fn", "supports"):
        function = getattr(impl, what)
        own = parameters_of(function) if function is not None else None
        if own is not None and shape(own) != shape(wanted):
            raise _refusal(
                owner,
                impl,
                f"its {what} takes ({_words(own)}), but the contract has ({_words(wanted)}): "
                "use the same names, order and defaults. Only trailing parameters with defaults "
                "may be missing or added",
            )
    if stray := impl.consumes - spec.consumable:
        raise _refusal(
            owner, impl, f"consumes has {', '.join(sorted(stray))}, which must not be overwritten"
        )


def _words(parameters: Iterable[inspect.Parameter]) -> str:
    return ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)


def _refusal(
    owner: Owner, impl: Impl | None, problem: str, *, kind: type[PluginError] = PluginError
) -> PluginError:
    what = f"{impl.op_name} implementation {impl.impl_id!r}" if impl else "registration"
    facts = {"op": impl.op_name, "impl": impl.impl_id} if impl else {}
    return owner.error(f": {what} rejected: {problem}.", kind=kind, **facts)


class Collector(OpRegistry):
    """The registry for plugins of the older form. It collects implementations, so a failure
    registers nothing. Reads return the registered and the collected implementations."""

    def __init__(self, registry: OpRegistry) -> None:
        super().__init__(registry.snapshot())
        self.impls: list[Impl] = []

    def register_many(self, impls: Iterable[Impl], owner: Owner = SCRIPT) -> None:
        self.impls += impls
        found = dict(self._first.impls_by_op)
        # Registration later refuses other objects by name.
        for impl in (each for each in self.impls if isinstance(each, Impl)):
            found[impl.op_name] = (*found.get(impl.op_name, ()), impl)
        self._snapshot = replace(self._first, impls_by_op=dict(sorted(found.items())))


@cache
def known_contracts() -> RegistrySnapshot:
    """Return the contracts of contract-only distributions, regardless of the settings. They are for
    scripts, and for callers that need only the ops. Plugins that fail to load are logged."""
    registry = OpRegistry(EMPTY)
    for plugin in load(registry, [each for each in discover() if each.kind == "contracts"]):
        if plugin.error is not None:
            log.error("%s", plugin.error)
    return registry.snapshot()
