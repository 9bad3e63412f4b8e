"""The manager of a process: loads plugins and settings once, resolves ops, and calls them."""

from __future__ import annotations

import dataclasses
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from types import MethodType
from typing import Any

from ..contracts.routes import Bound
from ..errors import NoImplementationError, PolicySealedError
from ..logs import get_logger
from ..plugins.registry import OpRegistry
from ..plugins.snapshot import EMPTY
from ..plugins.types import BackendImplKind, OpImpl
from ..settings.policy import Rows, SelectionPolicy
from ..settings.schema import Settings
from .chain import Chain
from .context import check_policy, chosen, override
from .guard import call_guard, method_guard, uncontracted
from .record import Record
from .resolver import STOCK, Resolver, Trace
from .startup import Startup, read_settings, start, try_settings

log = get_logger("dispatch")

current_policy = override.get
"""Returns the policy of the enclosing block. This name saves an attribute look-up per call."""

POLICIES_AT_MOST = 64
"""Maximum number of policies with cached functions. A program may make a new policy for every
call."""


class OpManager:
    """Resolves ops and calls them. One per process is enough: `get_default_manager()`.

    Args:
        registry: the implementations. By default the installed plugins are loaded at the first use.
        policy: this manager's policy. By default it is the policy of `set_global_policy`, or else
            the policy of the settings. If both arguments are given, the manager does not read
            settings.
    """

    def __init__(
        self, registry: OpRegistry | None = None, policy: SelectionPolicy | None = None
    ) -> None:
        self._given = (registry, policy)
        self._lock = threading.RLock()
        self._reset()
        _managers.add(self)

    def _reset(self) -> None:
        registry, self._policy = self._given
        self._registry = registry if registry is not None else OpRegistry(EMPTY)
        self._startup: Startup | None = None
        self._ready = registry is not None and self._policy is not None
        self._seals: dict[object, str] = {}
        """Key of a seal -> the description of its holder, for errors."""
        self._record = Record(log, self._demote)
        self._registry.on_change(self._forget)
        self._forget()

    def _forget(self) -> None:
        """Drop the bound functions, so the next call of each op resolves it again."""
        # Replaced instead of emptied, because another thread may be reading the old table.
        self._tables: dict[SelectionPolicy | None, dict[object, Bound]] = {None: {}}
        counts = self._startup is not None and self._startup.settings.counts_calls
        self._record.counts = "calls" if counts else ""

    @property
    def registry(self) -> OpRegistry:
        """The implementations. The first access loads the plugins."""
        self.ensure_initialized()
        return self._registry

    @property
    def startup(self) -> Startup | None:
        """The plugins and settings; None if the manager was given a registry and a policy."""
        self.ensure_initialized()
        return self._startup

    @property
    def settings(self) -> Settings | None:
        """The effective settings; None if the manager was given a registry and a policy."""
        return self.startup.settings if self.startup else None

    @property
    def policy(self) -> SelectionPolicy:
        """The policy of calls outside of a `with` block. Raises SettingsError if the settings
        cannot be read."""
        startup = self.startup
        policy = self._policy or chosen.policy
        if policy is None and startup is not None:
            if startup.problem is not None:
                raise startup.problem
            policy = startup.settings.policy
        assert policy is not None
        return policy

    @property
    def demotions(self) -> Mapping[tuple[str, str], str]:
        """(op, impl id) -> why the implementation was demoted."""
        return self._record.demotions

    @property
    def fallbacks(self) -> Counter[tuple[str, str]]:
        """(op, impl id) -> the number of calls that this implementation computed as a fallback."""
        return self._record.fallbacks

    @property
    def calls(self) -> Counter[tuple[str, str]]:
        """(op, impl id) -> the number of calls. They are counted only with
        VLLM_FL_COUNT_CALLS=1."""
        return self._record.calls

    def ensure_initialized(
        self,
        platform: str | None = None,
        *,
        defer_errors: bool = False,
        engine: Settings | None = None,
    ) -> None:
        """Load the plugins and read the settings, once per process.

        Args:
            platform: the platform for settings files, if the caller knows it.
            defer_errors: whether errors of the settings are raised later, when the policy is
                needed.
            engine: in a worker, the settings of its engine, which determine the plugins. A manager
                with a given registry does not load plugins.

        Raises:
            SettingsError: a setting is invalid. The next use reads the settings again.
        """
        if self._ready:
            return
        with self._lock:
            if self._ready:
                return
            registry, _ = self._given
            if registry is None:
                registry = OpRegistry(EMPTY)
                startup = start(registry, platform=platform, engine=engine)
            else:
                startup = Startup((), *try_settings(registry, platform=platform))
            if startup.problem is not None and not defer_errors:
                raise startup.problem
            self.use_startup(startup, registry)

    def use_startup(self, startup: Startup, registry: OpRegistry) -> None:
        """Use the plugins and settings of the caller. A policy that was set is kept."""
        with self._lock:
            self._registry, self._startup = registry, startup
            registry.on_change(self._forget)
            self._forget()
            self._ready = True

    def resolver(
        self,
        *,
        settings: Settings | None = None,
        policy: SelectionPolicy | None = None,
        disabled: Mapping[tuple[str, str], str] | None = None,
        **more: Any,
    ) -> Resolver:
        """Return a resolver for the current policy, settings and demotions.

        Args:
            settings: an engine's settings, which include its policy. By default they are the
                settings of this process.
            policy: by default the policy of the enclosing `with` block, or `self.policy`.
            disabled: see `Resolver`; by default the demotions of this manager.
            more: other fields of `Resolver`.

        Raises:
            SettingsError: the settings cannot be read.
        """
        self.ensure_initialized()
        if settings is not None:
            policy = settings.policy
        return Resolver(
            registry=self._registry,
            policy=policy or override.get() or self.policy,
            settings=settings or self.settings,
            disabled=dict(self._record.demotions) if disabled is None else disabled,
            **more,
        )

    def rows(self, op: str, **how: Any) -> Rows[Trace]:
        """Return the traces of `op` by the size of a call; see `Resolver.rows` and `resolver`."""
        return self.resolver(**how).rows(op)

    def trace(self, op: str, **how: Any) -> Trace:
        """Return the trace of the largest calls of `op`; see `rows`."""
        return self.rows(op, **how)[-1][1]

    def resolve_candidates(self, op: str) -> list[OpImpl]:
        """Return the candidates of the largest calls of `op`, in order."""
        resolver = self.resolver(without_layer=True)
        return _candidates(resolver, resolver.rows(op)[-1][1])

    def get_selected_impl_id(self, op: str) -> str:
        """Return the id of the first candidate in `resolve_candidates`."""
        return self.resolve_candidates(op)[0].impl_id

    def resolve(self, op: str) -> Bound:
        """Return the function that a call of `op` runs, including the fallback. It does not follow
        later changes of the policy.

        Raises:
            UnknownOpError: no contract and no plugin has `op`.
            NoImplementationError: every candidate was rejected.
        """
        return self._bound(op)

    def _chain(self, op: str, *, without_layer: bool, grants: frozenset[str]) -> Chain:
        resolver = self.resolver(without_layer=without_layer)
        rows: list[tuple[int | None, tuple[OpImpl, ...]]] = []
        for ceiling, trace in resolver.rows(op):
            log.debug("%s", trace)
            try:
                impls = tuple(_candidates(resolver, trace))
            except NoImplementationError as error:
                if ceiling is None:
                    raise
                impls = (_raising(op, error),)  # calls of other sizes can still run
            rows.append((ceiling, impls))
        self._record.announce(op, impls[0])
        spec = self._registry.snapshot().contracts.get(op) or uncontracted(op, impls[0])
        granted = grants | spec.caches
        return Chain(op, tuple(rows), spec, resolver.policy.strict, self._record, granted)

    def _bound(self, op: str, grants: frozenset[str] | None = None) -> Bound:
        """Return `op` as a function, or as a method of layers that own `grants` if given."""
        policy, key = override.get(), op if grants is None else (op, grants)
        if (known := self._tables.get(policy, {}).get(key)) is not None:
            return known
        with self._lock:
            self.ensure_initialized()
            tables = self._tables
            if policy not in tables and len(tables) > POLICIES_AT_MOST:
                # Drop the oldest policy of a `with` block.
                del tables[next(each for each in tables if each is not None)]
            table = tables.setdefault(policy, {})
            bound = table.get(key)
            if bound is None:
                chain = self._chain(op, without_layer=grants is None, grants=grants or frozenset())
                bound = table[key] = (call_guard if grants is None else method_guard)(chain)
            return bound

    def call(self, op_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call an op with the contract's arguments.

        Arguments are not modified, except for caches (`OpSpec.caches`), which the implementation
        may overwrite and return.

        Raises:
            TypeError: the arguments do not fit the contract's signature.
            CallError: the arguments break the contract.
            UnknownOpError, NoImplementationError, AllFailedError: no implementation ran.
        """
        try:
            bound = self._tables[current_policy()][op_name]
        except KeyError:
            bound = self._bound(op_name)
        # Omitting empty keywords saves a third of this function's time.
        return bound(*args, **kwargs) if kwargs else bound(*args)

    def call_as_method(self, op_name: str, instance: object, /, *args: Any, **kwargs: Any) -> Any:
        """Call an op as a method of a layer, which provides some parameters (`from_layer`)."""
        return self.bind(op_name, instance)(*args, **kwargs)

    def bind(self, op: str, instance: object, grants: frozenset[str] = frozenset()) -> Bound:
        """Return `op` as a method of `instance`, without the parameters that the layer provides.
        The layer owns the arguments in `grants`, so an implementation may overwrite them."""
        return MethodType(self._bound(op, grants), instance)

    def set_policy(self, policy: SelectionPolicy | None) -> None:
        """Set the policy of this manager and end all demotions. None restores the constructor's
        policy, or else the global policy, or else the policy of the settings, which are read again.

        Raises:
            TypeError: `policy` has another type.
            PolicySealedError: an engine's layers are bound to a plan.
        """
        if policy is not None:
            check_policy(policy)
        with self._lock:
            self._refuse_if_sealed("the policy")
            self._policy = policy or self._given[1]
            startup = self._startup
            if self._policy is None and chosen.policy is None and startup is not None:
                platform = startup.settings["platform"]
                detected = str(platform.value) if platform.origin == "detected" else None
                settings = read_settings(self._registry, platform=detected)
                self._startup = dataclasses.replace(startup, settings=settings, problem=None)
            self.clear_failed_impls()

    def clear_failed_impls(self, op: str | None = None) -> None:
        """End the demotions of `op`, or of every op. Raises PolicySealedError if layers are bound
        to a plan."""
        with self._lock:
            self._refuse_if_sealed("demotions")
            self._record.end_demotions(op)
            self._forget()

    def _demote(self, op: str, impl_id: str, why: str) -> bool:
        if self._seals:
            return False  # an engine uses the plan, and a demotion could not be undone
        with self._lock:
            if (op, impl_id) not in self._record.demotions:
                self._record.demote(op, impl_id, why)
                self._forget()
        return True

    def seal(self, by: str) -> Callable[[], object]:
        """Forbid resets, and changes of the policy and of demotions. Errors report `by` as the
        reason. Return a function that ends this seal; a second call has no effect."""
        key = object()
        self._seals[key] = by
        return partial(self._seals.pop, key, None)

    def _refuse_if_sealed(self, what: str) -> None:
        if self._seals:
            by = next(iter(self._seals.values()))
            raise PolicySealedError(
                f"{what} can no longer change: {by} is bound to the sealed plan, and "
                "compiled code would not see the change. Set it before the engine starts "
                "(VLLM_FL_CONFIG, VLLM_FL_*); `with policy_context(...)` still applies to call_op."
            )

    def reset(self) -> None:
        """Reset the manager. The next use loads plugins and settings again. Raises
        PolicySealedError if layers are bound to a plan."""
        with self._lock:
            self._refuse_if_sealed("the loaded state")
            self._reset()


def _candidates(resolver: Resolver, trace: Trace) -> list[OpImpl]:
    """Return the candidates of calls without an engine, in order. Raises NoImplementationError if
    there are none."""
    impls = [impl for impl in trace.admitted if isinstance(impl, OpImpl)]
    if not impls:
        raise resolver.nothing_for(trace)
    return impls


def _raising(op: str, error: NoImplementationError) -> OpImpl:
    def nothing(*args: Any) -> Any:
        raise error.with_traceback(None)

    return OpImpl(op, STOCK.impl_id, BackendImplKind.REFERENCE, nothing)


def set_shared_policy(policy: SelectionPolicy | None) -> None:
    """Set the policy of all managers created without a policy; None for the settings' policy.
    Raises PolicySealedError, without a change, if an engine's layers are bound to a plan."""
    following = [manager for manager in _managers if manager._given[1] is None]
    for manager in following:
        manager._refuse_if_sealed("the policy")
    chosen.policy = policy
    for manager in following:
        manager.set_policy(None)


_managers: weakref.WeakSet[OpManager] = weakref.WeakSet()

_held = ExitStack()
"""The locks that are held during a fork. Managers may be created or deleted in the meantime."""


def _hold_for_fork() -> None:
    """Acquire all locks, so a fork waits until other threads have loaded plugins and settings."""
    for manager in sorted(_managers, key=id):
        _held.enter_context(manager._lock)


def _start_clean_in_child() -> None:
    """Reset the state of a child except registered plugins, because its device may differ."""
    _held.pop_all()  # drops the locks without releasing them
    for manager in _managers:
        manager._lock = threading.RLock()
        manager._registry._lock = threading.Lock()  # a thread of the parent may hold it
        manager._record.clear()
        manager._forget()


os.register_at_fork(
    before=_hold_for_fork,
    after_in_parent=lambda: _held.pop_all().close(),
    after_in_child=_start_clean_in_child,
)


manager = OpManager()


def get_default_manager() -> OpManager:
    """Return the manager that `call_op` and the engines in this process use."""
    return manager
