"""The manager: load plugins and settings once, resolve ops, keep the result, and call it."""

from __future__ import annotations

import dataclasses
import inspect
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from types import MethodType
from typing import Any

from ..errors import CallError, NoImplementationError, PolicySealedError, SettingsError
from ..logs import get_logger
from ..plugins.calling import rejections
from ..plugins.communicator import NAMED_CLASSES
from ..plugins.plugin import Plugin
from ..plugins.registry import OpRegistry
from ..plugins.snapshot import EMPTY
from ..plugins.types import BackendImplKind, OpImpl
from ..settings.loading import Settings
from ..settings.policy import DEFAULT_ORDERS, Mode, Rows, SelectionPolicy
from ..settings.values import ORDER_PREFIX, wrong
from .absent import check_contract, check_named, nothing_for, unknown
from .chain import NEEDS_LAYER, Chain
from .context import chosen, override
from .guard import call_guard, method_guard, uncontracted
from .record import Record
from .resolver import STOCK, Trace, resolve
from .startup import Startup, read_settings, start, try_settings

log = get_logger("dispatch")

Bound = Callable[..., Any]

current = override.get
"""The policy of the running block, looked up once instead of at every call."""

UNNAMED: Any = object()
"""Stands for the op of a call that names it by keyword."""

POLICIES_AT_MOST = 64
"""Policies of contexts whose functions are kept: a program may make a new one for every call."""


class OpManager:
    """Resolves ops and calls them. One per process is enough: `get_default_manager()`.

    Args:
        registry: what is installed; by default the installed plugins, found at the first use.
        policy: this manager's policy; by default the one that `set_global_policy` gave, or that
            the settings give. A registry with a policy of its own reads no settings.
    """

    def __init__(
        self, registry: OpRegistry | None = None, policy: SelectionPolicy | None = None
    ) -> None:
        self._given = (registry, policy)
        self._lock = threading.RLock()
        self.epoch = 0
        """How often what was resolved has been forgotten."""
        self._reset()
        _managers.add(self)

    def _reset(self) -> None:
        registry, policy = self._given
        self._registry = registry if registry is not None else OpRegistry(EMPTY)
        self._policy = policy
        self._startup: Startup | None = None
        self._ready = registry is not None and policy is not None
        self._seals: dict[object, str] = {}
        """Who relies on the policy; each has a key of its own."""
        self._record = Record(log, self._demote)
        self._registry.on_change(self._forget)
        self._forget()

    def _forget(self) -> None:
        """Drop what was resolved; the next call of each op resolves anew."""
        # Tables are replaced, never emptied: a thread that reads one meanwhile sees a whole table.
        self._tables: dict[SelectionPolicy | None, dict[object, Bound]] = {None: {}}
        self._record.counts = "calls" if self._startup and self._startup.settings.debug else ""
        self.epoch += 1

    # What there is.

    @property
    def registry(self) -> OpRegistry:
        """What is installed. Reading it starts the plugins."""
        self.ensure_initialized()
        return self._registry

    @property
    def startup(self) -> Startup | None:
        """The plugins and settings found at start; None for a registry with its own policy."""
        self.ensure_initialized()
        return self._startup

    @property
    def settings(self) -> Settings | None:
        """The effective settings; None for a registry with its own policy."""
        return self.startup.settings if self.startup else None

    @property
    def policy(self) -> SelectionPolicy:
        """The global policy.

        Raises:
            SettingsError: the settings cannot be read, and no engine has brought its own.
        """
        self.ensure_initialized()
        if self._startup is not None and self._startup.problem is not None:
            raise self._startup.problem
        assert self._policy is not None
        return self._policy

    @property
    def demotions(self) -> Mapping[tuple[str, str], str]:
        """(op, impl id) -> why it was demoted."""
        return self._record.demotions

    @property
    def fallbacks(self) -> Counter[tuple[str, str]]:
        """(op, impl id) -> calls that this later candidate took over."""
        return self._record.fallbacks

    @property
    def calls(self) -> Counter[tuple[str, str]]:
        """(op, impl id) -> calls; counted only under VLLM_FL_DISPATCH_DEBUG=1."""
        return self._record.calls

    def ensure_initialized(
        self,
        platform: str | None = None,
        *,
        defer_errors: bool = False,
        engine: Settings | None = None,
    ) -> None:
        """Find and load the plugins and read the settings, once per process.

        Args:
            platform: whose settings files count, where the caller knows it.
            defer_errors: raise what is wrong with the settings when the policy is needed, not here.
            engine: the settings of the engine whose worker this is, which say what is loaded; with
                a registry that was given nothing is.

        Raises:
            SettingsError: a setting is wrong. The next use tries again.
            PluginError: a plugin failed and VLLM_FL_STRICT_PLUGINS=1.
        """
        if self._ready:
            return
        with self._lock:
            if self._ready:
                return
            if self._given[0] is not None:  # the settings hold, and nothing is looked for
                settings, problem = try_settings(self._registry, (), platform=platform)
                if problem is not None and not defer_errors:
                    raise problem
                self._startup = Startup((), settings, problem)
            else:
                registry = OpRegistry(EMPTY)
                startup = start(
                    registry, platform=platform, defer_errors=defer_errors, engine=engine
                )
                self._registry, self._startup = registry, startup
                registry.on_change(self._forget)
            if self._policy is None:  # one that was set before the first use stands
                self._policy = chosen.policy or self._startup.settings.policy
            self._forget()
            self._ready = True

    def use_startup(self, startup: Startup, registry: OpRegistry) -> None:
        """Use plugins and settings that the caller has found. A policy that was set stands."""
        with self._lock:
            self._registry, self._startup = registry, startup
            self._policy = self._given[1] or chosen.policy or startup.settings.policy
            registry.on_change(self._forget)
            self._forget()
            self._ready = True

    # Resolving.

    def trace(
        self,
        op: str,
        *,
        mode: Mode = "eager",
        engine: bool = False,
        settings: Settings | None = None,
        demoted: Mapping[str, str] | None = None,
        policy: SelectionPolicy | None = None,
        without_layer: bool = False,
        foreign: Mapping[str, str] | None = None,
        tokens: int | None = None,
        facts: Any = None,
    ) -> Trace:
        """Every candidate of `op` with what was decided about it.

        Args:
            op: the op's name.
            mode: the engine's mode.
            engine: whether vLLM's own path is a candidate.
            settings: an engine's settings, policy included; by default the process's.
            demoted: impl id -> why an engine demoted it; by default the process's demotions.
            policy: the policy; by default the one in force.
            without_layer: reject implementations that need a layer, since there is none.
            foreign: the op's layers that another plugin has replaced -> whose they are.
            tokens: how many tokens a call has, where the op is ordered by size (`ceilings`); None
                is more than every ceiling.
            facts: the engine's (`EngineFacts`), for what plugins reject.

        Raises:
            UnknownOpError: neither a contract nor a plugin names `op`.
            PluginError: the policy names an implementation whose plugin failed, or the op has no
                contract and a plugin failed that may have brought it.
        """
        policy = self.effective_policy(settings, policy)
        snapshot = self._registry.snapshot()
        impls = snapshot.impls_by_op.get(op, ())
        if not impls and op not in snapshot.contracts and op not in NAMED_CLASSES:
            raise unknown(op, snapshot, self._plugins)
        rejected = rejections(
            self._registry.plugins,
            settings or self.settings,
            op,
            impls,
            facts,
            snapshot.contracts.get(op),
        )
        rejected |= self._record.demoted(op) if demoted is None else demoted
        if without_layer:
            rejected |= {
                i.impl_id: NEEDS_LAYER for i in impls if isinstance(i, OpImpl) and i.needs_layer
            }
        trace = resolve(
            op,
            impls,
            policy,
            mode=mode,
            rejections=rejected,
            engine=engine,
            foreign=foreign,
            tokens=tokens,
        )
        check_named(trace, impls, self._plugins)
        check_contract(op, snapshot, self._plugins)
        return trace

    def rows(
        self,
        op: str,
        *,
        mode: Mode = "eager",
        settings: Settings | None = None,
        policy: SelectionPolicy | None = None,
        **more: Any,
    ) -> Rows[Trace]:
        """The traces of `op` by the size of a call: (ceiling, trace), the last for all larger ones.

        Args:
            op: the op's name.
            mode, settings, policy, more: as for `trace`, whose errors and those of `ceilings` it
                raises.
        """
        ceilings = self.ceilings(op, mode=mode, settings=settings, policy=policy)
        given = {"mode": mode, "settings": settings, "policy": policy, **more}
        return tuple((n, self.trace(op, tokens=n, **given)) for n in (*ceilings, None))

    def check_contracts(self) -> None:
        """Check that every implementation that an engine could run has a contract.

        Raises:
            PluginError: one has none, and the plugin failed, or is not there, that brings it.
        """
        snapshot = self.registry.snapshot()
        for op in snapshot.impls_by_op:
            check_contract(op, snapshot, self._plugins)

    def ceilings(
        self,
        op: str,
        *,
        mode: Mode = "eager",
        settings: Settings | None = None,
        policy: SelectionPolicy | None = None,
    ) -> tuple[int, ...]:
        """The token counts up to which calls of `op` have an order of their own, ascending.

        Args:
            op: the op's name.
            mode, settings, policy: as for `trace`.

        Raises:
            SettingsError: the op has no calls with tokens, or nobody says which argument has them.
        """
        policy = self.effective_policy(settings, policy)
        ceilings = policy.ceilings(op, mode)
        spec = self._registry.snapshot().contracts.get(op)
        if ceilings and (spec is None or not spec.by_token):
            known = settings if settings is not None else self.settings
            listed = known.get(f"{ORDER_PREFIX}{op}") if known is not None else None
            raise wrong(
                f"{ORDER_PREFIX}{op}",
                listed.origin if listed else "SelectionPolicy",
                "orders by size hold for ops with a contract that says which arguments have a row "
                f"per token; {op} has none, and is resolved once for all calls. Write one list",
                kind=SettingsError,
            )
        return ceilings

    def effective_policy(
        self, settings: Settings | None = None, policy: SelectionPolicy | None = None
    ) -> SelectionPolicy:
        """The policy that decides: an engine's, else a given one, else the running block's, else
        this manager's.

        Args:
            settings: an engine's.
            policy: the given one.

        Raises:
            SettingsError: the settings cannot be read, and no engine has brought its own.
        """
        self.ensure_initialized()
        if settings is not None:
            return settings.policy
        return policy or override.get() or self.policy

    @property
    def _plugins(self) -> tuple[Plugin, ...]:
        return self._startup.plugins if self._startup else ()

    def resolve_candidates(self, op: str) -> list[OpImpl]:
        """The implementations of `op` that `call` would try, in order; ordered by size, those of
        the largest calls."""
        return self._candidates(self.trace(op, without_layer=True))

    def resolve(self, op: str) -> Bound:
        """The function that a call of `op` runs, with the rules of fallback around it.

        It stays what it is: after a change of policy, resolve again.

        Raises:
            UnknownOpError: nobody names `op`.
            NoImplementationError: no candidate may run.
        """
        return self._bound(op)

    def get_selected_impl_id(self, op: str) -> str:
        """The id of the implementation that a call of `op` tries first; ordered by size, the
        largest calls."""
        return self._candidates(self.trace(op, without_layer=True))[0].impl_id

    def _candidates(self, trace: Trace) -> list[OpImpl]:
        impls = [i for i in trace.admitted if isinstance(i, OpImpl)]
        if not impls:
            raise nothing_for(trace, self._registry.snapshot(), self._plugins)
        return impls

    def _chain(
        self, op: str, *, without_layer: bool, grants: frozenset[str] = frozenset()
    ) -> Chain:
        policy = self.effective_policy()
        if policy.prefer == "stock" and policy.listed(op) is None:
            self._record.without_stock(DEFAULT_ORDERS[policy.prefer])
        rows: list[tuple[int | None, tuple[OpImpl, ...]]] = []
        for ceiling, trace in self.rows(op, policy=policy, without_layer=without_layer):
            log.debug("%s", trace)
            try:
                impls = tuple(self._candidates(trace))
            except NoImplementationError as error:
                if ceiling is None:
                    raise
                # A row that engines leave to vLLM: it is no obstacle to calls of other sizes.
                impls = (_raising(op, error),)
            rows.append((ceiling, impls))
        self._record.announce(op, impls[0])
        spec = self._registry.snapshot().contracts.get(op) or uncontracted(op, impls[0])
        return Chain(op, tuple(rows), spec, policy.strict, self._record, grants)

    def _bound(self, op: str, grants: frozenset[str] | None = None) -> Bound:
        """`op` as a function; as a method of layers that own `grants`, where these are given."""
        policy, key = override.get(), op if grants is None else (op, grants)
        with self._lock:
            self.ensure_initialized()
            tables = self._tables
            if policy not in tables and len(tables) > POLICIES_AT_MOST:
                # The oldest policy of a context gives way.
                del tables[next(each for each in tables if each is not None)]
            table = tables.setdefault(policy, {})
            bound = table.get(key)
            if bound is None:
                guard = call_guard if grants is None else method_guard
                chain = self._chain(op, without_layer=grants is None, grants=grants or frozenset())
                bound = table[key] = guard(chain)
            return bound

    # Calling.

    def call(self, op: str = UNNAMED, /, *args: Any, **kwargs: Any) -> Any:
        """Call `op` with the contract's arguments. They are left intact.

        The op may also be given as the keyword `op_name`.

        Raises:
            CallError: the arguments break the contract.
            UnknownOpError, NoImplementationError, AllFailedError: nothing could run.
        """
        try:
            bound = self._tables[current()][op]
        except KeyError:
            if op is UNNAMED:
                if "op_name" not in kwargs:
                    raise TypeError("call_op needs the name of an op, first") from None
                return self.call(kwargs.pop("op_name"), *args, **kwargs)
            bound = self._bound(op)
        try:
            # Passing no keywords on is a third of what this function costs.
            return bound(*args, **kwargs) if kwargs else bound(*args)
        except TypeError as error:
            _blame_signature(op, bound, args, kwargs, error)
            raise

    def call_as_method(self, op: str, instance: object, /, *args: Any, **kwargs: Any) -> Any:
        """Call `op` as a method of a layer, which provides what the contract says it provides."""
        bound = self.bind(op, instance)
        try:
            return bound(*args, **kwargs)
        except TypeError as error:
            _blame_signature(op, bound, args, kwargs, error)
            raise

    def bind(self, op: str, instance: object, grants: frozenset[str] = frozenset()) -> Bound:
        """`op` as a method of `instance`: the contract without what the layer provides.

        Args:
            op: the op's name.
            instance: the layer.
            grants: arguments that the layer owns, so that an implementation may overwrite them.
        """
        return MethodType(self._bound(op, grants), instance)

    # Changing.

    def set_policy(self, policy: SelectionPolicy | None) -> SelectionPolicy | None:
        """Make `policy` this manager's; None reads the settings again. Ends every demotion.

        Returns:
            The policy before; None where there was none yet.

        Raises:
            PolicySealedError: an engine's layers are bound to a plan.
        """
        if policy is not None and not isinstance(policy, SelectionPolicy):
            raise TypeError(f"expected a SelectionPolicy, got {policy!r}")
        with self._lock:
            self._refuse_if_sealed("the policy")
            before = self._policy
            if policy is None and self._startup is not None:
                platform = self._startup.settings["platform"]
                settings = read_settings(
                    self._registry,
                    self._startup.plugins,
                    platform=str(platform.value) if platform.origin == "detected" else None,
                )
                self._startup = dataclasses.replace(self._startup, settings=settings, problem=None)
                policy = settings.policy
            self._policy = policy if policy is not None else self._given[1]
            self._record.end_demotions()
            self._forget()
            return before

    def clear_failed_impls(self, op: str | None = None) -> None:
        """End the demotions of `op`, or of every op.

        Raises:
            PolicySealedError: an engine's layers are bound to a plan.
        """
        with self._lock:
            self._refuse_if_sealed("demotions")
            self._record.end_demotions(op)
            self._forget()

    def _demote(self, op: str, impl_id: str, why: str) -> bool:
        if self._seals:
            return False  # an engine relies on the plan: nothing could take the demotion back
        with self._lock:
            if impl_id not in self._record.demoted(op):
                self._record.demote(op, impl_id, why)
                self._forget()
        return True

    def seal(self, by: str) -> Callable[[], object]:
        """From now on the policy stands: `by` says who relies on it.

        Returns:
            What ends this seal again; a second call does nothing.
        """
        key = object()
        self._seals[key] = by
        return partial(self._seals.pop, key, None)

    def _refuse_if_sealed(self, what: str) -> None:
        if self._seals:
            by = next(iter(self._seals.values()))
            raise PolicySealedError(
                f"{what} cannot change any more: {by} is bound to the sealed plan, and "
                "compiled code would not see the change. Set it before the engine starts "
                "(VLLM_FL_CONFIG, VLLM_FL_*); `with policy_context(...)` still steers call_op."
            )

    def reset(self) -> None:
        """Forget everything; the next use starts anew.

        Raises:
            PolicySealedError: an engine's layers are bound to a plan.
        """
        with self._lock:
            self._refuse_if_sealed("what was started")
            self._reset()


def _raising(op: str, error: NoImplementationError) -> OpImpl:
    """What stands for a row in which nothing may run: calls of its sizes raise `error`."""

    def nothing(*args: Any) -> Any:
        raise NoImplementationError(error.message, op=op, rejected=error.rejected)

    return OpImpl(op, STOCK.impl_id, BackendImplKind.REFERENCE, nothing)


def set_global_policy(policy: SelectionPolicy | None) -> None:
    """Let every manager without a policy of its own go by `policy`; None: by the settings.

    Raises:
        PolicySealedError: an engine's layers are bound to a plan. Nothing has changed.
    """
    if policy is not None and not isinstance(policy, SelectionPolicy):
        raise TypeError(f"expected a SelectionPolicy, got {policy!r}")
    following = [manager for manager in _managers if manager._given[1] is None]
    for manager in following:
        manager._refuse_if_sealed("the policy")
    chosen.policy = policy
    for manager in following:
        manager.set_policy(policy)


def _blame_signature(
    op: str, bound: Bound, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: TypeError
) -> None:
    """Raise CallError when the call does not fit the signature; another TypeError is not ours."""
    signature = inspect.signature(bound)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as mismatch:
        quoted = str(mismatch).split("'")
        argument = quoted[1] if len(quoted) > 2 else "(call)"
        problem = f"does not fit {op}{signature}: {mismatch}"
        raise CallError(op, argument, problem, cause=error) from error


_managers: weakref.WeakSet[OpManager] = weakref.WeakSet()

_held = ExitStack()
"""The locks that are held over a fork, whatever managers come and go meanwhile."""


def _hold_for_fork() -> None:
    """A fork waits for a start that another thread is in the middle of."""
    for manager in sorted(_managers, key=id):
        _held.enter_context(manager._lock)


def _start_clean_in_child() -> None:
    """A child keeps what is registered and decides anew: its device may be another one."""
    _held.pop_all()  # without releasing them
    for manager in _managers:
        manager._lock = threading.RLock()
        manager._registry._lock = threading.Lock()  # perhaps held by a thread that is not here
        manager._record.clear()
        manager._forget()


os.register_at_fork(
    before=_hold_for_fork,
    after_in_parent=lambda: _held.pop_all().close(),
    after_in_child=_start_clean_in_child,
)
