"""The resolver: sorts the candidates of an op by policy and rejections, with a reason for each. Log
lines, errors, the command line and the engine's plan use its `Trace`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from operator import itemgetter
from typing import Any, Literal, cast

from ..errors import NoImplementationError, PluginError, SettingsError, UnknownOpError
from ..plugins.calling import plugin_rejections
from ..plugins.registry import OpRegistry
from ..plugins.reserved import FL_OPS, ops_missing
from ..plugins.types import (
    KERNEL_OPS,
    LINEAR_OPS,
    NAMED_CLASSES,
    BackendImplKind,
    ExpertKernelImpl,
    Impl,
    KernelImpl,
    LinearKernelImpl,
    OpImpl,
)
from ..settings.names import meant
from ..settings.policy import Mode, Rows, SelectionPolicy, Selector
from ..settings.schema import Settings
from ..settings.values import ORDER_PREFIX, wrong
from ..text import closest


@dataclass(frozen=True)
class Stock:
    """vLLM's implementation, which runs without vllm-fl. It is always a candidate in an engine."""

    impl_id: str = "stock.vllm"
    vendor: None = None
    priority: None = None

    @property
    def selector(self) -> str:
        return self.impl_id.partition(".")[0]


STOCK = Stock()

FOREIGN = Stock("foreign.oot")
"""The class of another vLLM plugin that replaces a layer of the op."""

UNORDERED = "default, no order for this op"
"""Why `stock` is at its position, if the op has no order."""


UNAVAILABLE = "not available: "
"""Prefix of the reason why an implementation is not available on this machine."""


@dataclass(frozen=True)
class Candidate:
    """One implementation. `status` is `selected` (the first), `eligible` (any other) or `rejected`.
    `reason` is why it was rejected, or the selector that gives its position in the order."""

    impl: Impl | Stock
    status: Literal["selected", "eligible", "rejected"]
    reason: str

    @property
    def impl_id(self) -> str:
        return self.impl.impl_id


@dataclass(frozen=True)
class Trace:
    """All candidates of one op: the admitted candidates in order, then the rejected ones."""

    op: str
    mode: Mode
    order: tuple[Selector, ...]
    candidates: tuple[Candidate, ...]

    @property
    def selected(self) -> Impl | Stock | None:
        return next(iter(self.admitted), None)

    @property
    def admitted(self) -> tuple[Impl | Stock, ...]:
        return tuple(c.impl for c in self.candidates if c.status != "rejected")

    @property
    def before_stock(self) -> tuple[Impl, ...]:
        """The admitted implementations before `stock` and `foreign`, in order."""
        before = takewhile(lambda impl: not isinstance(impl, Stock), self.admitted)
        return cast("tuple[Impl, ...]", tuple(before))

    @property
    def rejected(self) -> tuple[tuple[str, str], ...]:
        return tuple((c.impl_id, c.reason) for c in self.candidates if c.status == "rejected")

    @property
    def unavailable(self) -> dict[str, str]:
        return {
            impl_id: why.removeprefix(UNAVAILABLE)
            for impl_id, why in self.rejected
            if why.startswith(UNAVAILABLE)
        }

    def __str__(self) -> str:
        lines = [f"{self.op} ({self.mode}), order {'|'.join(map(str, self.order))}:"]
        lines += [f"  {c.status:<9} {c.impl_id}: {c.reason}" for c in self.candidates]
        return "\n".join(lines)


def describe_impl(impl: Impl | Stock) -> str:
    kind = impl.selector if isinstance(impl, Stock) else impl.kind.value
    return f"'{impl.impl_id}' (kind={kind}, vendor={impl.vendor})"


def vllms_kernel(op: str, impl_id: str) -> KernelImpl:
    """Return vLLM's own class with this id. Only selectors with the id select it, not its kind. Its
    path is never imported."""
    kind = LinearKernelImpl if op in LINEAR_OPS else ExpertKernelImpl
    scheme = op.removesuffix(kind.suffix)
    return kind(scheme, f"vllm.{impl_id}", BackendImplKind.REFERENCE, impl_id=impl_id)


NEEDS_LAYER = "it needs the calling layer (self), which only call_method_op and eager layers pass"


@dataclass(frozen=True, kw_only=True)
class Resolver:
    """Decides between the implementations of ops.

    Args:
        settings: the settings for rejections by plugins. If it is None, plugins are not called.
        mode: the engine's mode; an op may have an order for each mode.
        engine: whether vLLM's code is a candidate.
        disabled: (op, impl id) -> why it is disabled or demoted.
        without_layer: whether to reject implementations that need the calling layer.
        foreign: op -> layer of the op that another plugin has replaced -> the plugin's name.
        facts: the engine's facts (`EngineFacts`), for rejections by plugins.
    """

    registry: OpRegistry
    policy: SelectionPolicy
    settings: Settings | None = None
    mode: Mode = "eager"
    engine: bool = False
    disabled: Mapping[tuple[str, str], str] = field(default_factory=dict)
    without_layer: bool = False
    foreign: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    facts: Any = None

    def rows(self, op: str) -> Rows[Trace]:
        """Return the traces of `op` by the size of a call: (maximum tokens, trace). The last
        maximum is None.

        Raises:
            UnknownOpError: no contract and no plugin has `op`.
            PluginError: the policy selects an implementation of a plugin that failed, or the
                contract of `op` is missing.
            SettingsError: the order of `op` depends on the size, but the op's calls have no size.
        """
        snapshot = self.registry.snapshot()
        impls = snapshot.impls_by_op.get(op, ())
        if not impls and op not in snapshot.contracts and op not in NAMED_CLASSES:
            raise self._unknown(op)
        if op in KERNEL_OPS:
            order = self.policy.order(op, self.mode, engine=self.engine)
            named = (selector.name for selector in order if selector.is_vllms)
            impls = (*impls, *(vllms_kernel(op, name) for name in named if name))
        contract = snapshot.contracts.get(op)
        rejected = plugin_rejections(
            self.registry.plugins, self.settings, op, impls, self.facts, contract
        ) | {impl_id: why for (name, impl_id), why in self.disabled.items() if name == op}
        if self.without_layer:
            layered = (i for i in impls if isinstance(i, OpImpl) and i.needs_layer)
            rejected |= dict.fromkeys((i.impl_id for i in layered), NEEDS_LAYER)
        sizes = (*self.ceilings(op), None)
        rows = tuple((n, self.resolve(op, impls, rejected, tokens=n)) for n in sizes)
        for _, trace in rows:
            self._check_named(trace, impls)
        self.check_contract(op)
        return rows

    def resolve(
        self,
        op: str,
        impls: Iterable[Impl],
        rejected: Mapping[str, str],
        *,
        tokens: int | None = None,
    ) -> Trace:
        """Return the candidates of one op, in order, for calls of one size.

        An implementation is rejected if a vendor filter or `rejected` excludes it, if no selector
        of the order matches it, or if it is not available on the machine. The first of these is the
        reason. The implementations of one selector are sorted by descending priority, then by impl
        id.

        In an engine, `stock` has the position of its selector, or is last without one. In strict
        mode, a user's order without `stock` and `foreign` excludes it. Layers that another plugin
        has replaced have the position of the selector `foreign`. Without that selector they are
        first. They are last instead, or excluded in strict mode, if the user's order is for the op
        itself.

        Args:
            rejected: impl id -> why it is rejected, independent of the policy.
            tokens: the number of tokens of the calls; None for more than all maximums.
        """
        policy, engine, mode = self.policy, self.engine, self.mode
        order = policy.order(op, mode, engine=engine, tokens=tokens)
        listed = policy.listed(op, mode)
        determiner = "your" if listed is not None and listed.pinned else "the"
        ranked: list[tuple[tuple[int, int, str], Impl | Stock, str]] = []
        excluded: list[Candidate] = []
        for impl in sorted(impls, key=lambda i: (i.kind.value, i.impl_id)):
            place = next((n for n, selector in enumerate(order) if selector.matches(impl)), None)
            rejection = policy.refuses(impl) or rejected.get(impl.impl_id)
            if rejection is None and place is None:
                rejection = f"not listed: {'|'.join(map(str, order))}"
            if rejection is None:
                verdict = impl.availability()
                rejection = None if verdict is True else f"{UNAVAILABLE}{verdict}"
            if rejection is not None or place is None:
                excluded.append(Candidate(impl, "rejected", rejection or ""))
            else:
                rank = (place, -(impl.priority or 0), impl.impl_id)
                ranked.append((rank, impl, f"{determiner} order lists {order[place]}"))
        named = {selector.kind: n for n, selector in enumerate(order)}
        forced = policy.strict and listed is not None and listed.pinned and "foreign" not in named
        foreign = self.foreign.get(op)
        if engine and foreign:
            is_own = policy.names(op, itself=True) and listed is policy.per_op_order[op]
            place = named.get("foreign", len(order) if is_own else -1)
            (layer, owner), *others = foreign.items()
            more = f", and {len(others)} more" * bool(others)
            reason = f"layer {layer} is replaced by {owner}{more}"
            if place < 0:
                reason += f"; to use vllm-fl instead, set an order for {op} itself (VLLM_FL_PER_OP)"
            if forced and place > 0:
                excluded.append(Candidate(FOREIGN, "rejected", "strict mode: not in your order"))
            else:
                ranked.append(((place, 0, ""), FOREIGN, reason))
        if engine and "stock" in named:
            ordered = listed or policy.prefer == "stock"
            reason = f"{determiner} order lists stock" if ordered else UNORDERED
            ranked.append(((named["stock"], 0, ""), STOCK, reason))
        elif engine and not forced:
            ranked.append(((len(order), 0, ""), STOCK, "vLLM's code is last by default"))
        candidates = [
            Candidate(impl, "selected" if n == 0 else "eligible", reason)
            for n, (_, impl, reason) in enumerate(sorted(ranked, key=itemgetter(0)))
        ]
        return Trace(op, mode, order, (*candidates, *excluded))

    def ceilings(self, op: str) -> tuple[int, ...]:
        """Return the maximum tokens of each row of the order of `op`, ascending. Raises
        SettingsError if the order depends on the size, but no argument has a row per token."""
        ceilings = self.policy.ceilings(op, self.mode)
        spec = self.registry.snapshot().contracts.get(op)
        if ceilings and (spec is None or not spec.by_token):
            key = f"{ORDER_PREFIX}{op}"
            listed = self.settings.get(key) if self.settings is not None else None
            raise wrong(
                key,
                listed.origin if listed else "SelectionPolicy",
                "an order by size needs a contract that declares arguments by token (by_token), "
                f"but {op} has none. Write one order for all sizes",
                kind=SettingsError,
            )
        return ceilings

    def check_contract(self, op: str) -> None:
        """Check that an op with implementations has a contract to verify them. Raises PluginError
        if it is missing because a plugin failed or is not installed."""
        snapshot, plugins = self.registry.snapshot(), self.registry.plugins
        impls = snapshot.impls_by_op.get(op, ())
        first = next((impl for impl in impls if isinstance(impl, OpImpl)), None)
        if first is None or op in snapshot.contracts:
            return
        owner = snapshot.owners.get((op, first.impl_id))
        of_owner = f" of {owner.name}" if owner is not None else ""
        lost = f"Op '{op}' has no contract to verify '{first.impl_id}'{of_owner}"
        for plugin in plugins:
            may_have_had_it = not plugin.hooks or "contracts" in plugin.hooks
            if plugin.error is not None and may_have_had_it:
                message = f"{lost}; the plugin that may provide it failed."
                raise _failed(message, plugin.error, op, first.impl_id)
        why = ops_missing(plugins)
        if why and owner in {plugin.owner for plugin in plugins}:
            raise PluginError(f"{lost}: {why}.", op=op, impl=first.impl_id, distribution=FL_OPS)

    def _check_named(self, trace: Trace, impls: tuple[Impl, ...]) -> None:
        for selector in trace.order:
            if selector.name is None or any(selector.matches(impl) for impl in impls):
                continue
            for plugin in self.registry.plugins:
                if plugin.error is not None and plugin.may_bring(selector.name, trace.op):
                    message = (
                        f"The settings select '{selector}' for op '{trace.op}', but the plugin "
                        "that would provide it failed."
                    )
                    raise _failed(message, plugin.error, trace.op, selector.name)

    def _unknown(self, op: str) -> UnknownOpError:
        snapshot, plugins = self.registry.snapshot(), self.registry.plugins
        known = snapshot.ops
        left_out = [plugin.owner.label for plugin in plugins if plugin.status == "disabled"]
        more = f" Disabled by VLLM_FL_PLUGINS: {', '.join(left_out)}." if left_out else ""
        if (why := ops_missing(plugins)) and not snapshot.contracts:
            more = f" Contracts are missing: {why}."
        return UnknownOpError(
            f"No contract or installed plugin has the op '{op}'.{closest(op, known)} "
            f"Known: {', '.join(known) or 'none'}.{more}",
            op=op,
        )

    def nothing_for(self, trace: Trace) -> NoImplementationError:
        snapshot, rejected = self.registry.snapshot(), trace.rejected
        if rejected:
            why = "every candidate was rejected: " + "; ".join(f"{i}: {r}" for i, r in rejected)
            impls = snapshot.impls_by_op.get(trace.op, ())
            for selector in trace.order:
                if selector.name and not any(selector.matches(impl) for impl in impls):
                    why += f". {str(selector)!r} matches no implementation.{meant(selector, impls)}"
                    why = why.removesuffix(".")
            todo = f"`vllm-fl explain {trace.op} --script` shows where each setting comes from."
        else:
            brought = sorted({owner.label for owner in snapshot.owners.values()})
            why = f"no installed plugin provides one (installed: {', '.join(brought) or 'none'})"
            todo = (
                "Install a backend: pip install vllm-fl-reference (plain PyTorch), or your "
                "hardware vendor's."
            )
        failed = [p.owner.label for p in self.registry.plugins if p.error is not None]
        if failed:
            todo += (
                f" These plugins failed to load completely: {', '.join(failed)}; see "
                "`vllm-fl doctor`."
            )
        return NoImplementationError(
            f"Op '{trace.op}' has no implementation that can run: {why}. {todo}",
            op=trace.op,
            rejected=rejected,
        )


def _failed(message: str, error: PluginError, op: str, impl: str) -> PluginError:
    return PluginError(
        f"{message} {error.message}",
        op=op,
        impl=impl,
        plugin=error.plugin,
        distribution=error.distribution,
        cause=error,
    )
