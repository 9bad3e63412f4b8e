"""Ops of vLLM's IR, in the releases that have it: one provider of ours stands for the plan.

vLLM lowers an IR op while it compiles, to the provider that comes first. What ours calls there is
what the plan of the engine that compiles has made of the op. In eager engines, whose norms are
layers bound to the plan (`layers.py`), it serves who calls the IR directly, by the plan of the
engine that is calling. Releases without `vllm.ir` compile the layers' own forwards.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ...contracts.binding import IrTarget, LayerTarget
from ...dispatch.chain import Chain
from ...engine.facts import EngineFacts
from ...engine.opaque import is_opaque, opaque_op
from ...engine.plan import Plan
from ...plugins.types import OpImpl
from ...settings.loading import Settings
from ..engines import Engine, now
from ..patcher import Patcher, WhyNot
from ..targets import installed_bindings, stock_form, targets

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.ir.op import IrOp

PROVIDER = "vllm_fl"
"""Our name among the providers of an IR op."""

_bound: dict[str, Callable[..., Any]] = {}
"""IR op -> what our provider calls: what the plan made of it, for the engine that compiles next."""


@dataclass
class Providers:
    """What runs at ops of vLLM's IR in one engine.

    Attributes:
        direct: IR op -> what runs when eager code calls it.
        behind: IR op -> the other providers, in vLLM's order: what `stock` means there.
    """

    direct: dict[str, Callable[..., Any]] = field(default_factory=dict)
    behind: dict[str, list[str]] = field(default_factory=dict)


def providers(engine: Engine) -> Providers:
    """Return what runs at ops of the IR in an engine."""
    found: Providers = engine.state.setdefault(Providers, Providers())
    return found


def ir_ops() -> dict[str, list[IrTarget]]:
    """Return op -> its targets in vLLM's IR, as far as this vLLM has these ops in it."""
    from vllm import ir

    found: dict[str, list[IrTarget]] = {}
    for op, target in targets(installed_bindings(), IrTarget):
        if hasattr(ir.ops, target.name):
            found.setdefault(op, []).append(target)
    return found


def ir_op_of(target: IrTarget) -> Any:
    """vLLM's IR op of one of the targets of `ir_ops`."""
    from vllm import ir

    return getattr(ir.ops, target.name)


def register_provider() -> None:
    """Give vLLM our provider of each IR op that a binding names, once per process.

    vLLM is told that it supports every call: what refuses one is inside, in the plan's chain.
    """
    for of_op in ir_ops().values():
        for target in of_op:
            op: IrOp = ir_op_of(target)
            if PROVIDER not in op.impls:
                op.register_impl(PROVIDER, supported=True)(_provider(target.name, op))


def _provider(name: str, op: Any) -> Callable[..., Any]:
    """The provider's function. Its signature is the IR op's: vLLM compares the two."""
    native = op.impls["native"].impl_fn
    _bound[name] = native

    def vllm_fl(*args: Any, **named: Any) -> Any:
        engine = now()
        known: Providers | None = engine.state.get(Providers) if engine is not None else None
        own = known.direct.get(name) if known is not None else None
        return (own or _bound[name])(*args, **named)

    vllm_fl.__signature__ = inspect.signature(native)  # type: ignore[attr-defined]
    return vllm_fl


def prioritise(default: Any, plan: Plan) -> Any:
    """vLLM's default priorities, with our provider in front of planned ops.

    The candidates of the plan are not named: they stand in the plan's own chain. In eager mode a
    layer that the user leaves to vLLM calls the IR, which then is left to vLLM, too.
    """
    table = installed_bindings()
    kept = {op for op, target in targets(table, LayerTarget) if target.cls in plan.kept_layers}
    for op, of_op in ir_ops().items():
        if not plan.is_stock(op) and (plan.mode == "compiled" or op not in kept):
            for target in of_op:
                others = [p for p in getattr(default, target.name) if p != PROVIDER]
                setattr(default, target.name, [PROVIDER, *others])
    return default


def reset_priorities(engine: Engine) -> None:
    """Give vLLM the priorities of the sealed plan: its worker installed those of the first one."""
    from vllm.platforms import current_platform

    planned, plan = ir_ops(), engine.plan
    vllm_config: VllmConfig = engine.config
    behind = providers(engine).behind
    behind.clear()
    if not planned:
        return
    sealed = prioritise(current_platform.vllm_fl_stock_priority(vllm_config), plan)
    config = vllm_config.kernel_config.ir_op_priority
    for op, of_op in planned.items():
        if op not in plan.entries or plan.entries[op].note:
            continue  # the user's own priority stands
        for target in of_op:
            first = getattr(sealed, target.name)
            kept = [p for p in getattr(config, target.name) if p not in (PROVIDER, *first)]
            setattr(config, target.name, [*first, *kept])
            others = [name for name in (*first, *kept) if name != PROVIDER]
            behind[target.name] = others
    config.set_default()


def bind_provider(engine: Engine, *, by_range: bool = False) -> None:
    """Let our provider call what the plan has made of each op, in the model compiled next.

    Args:
        engine: the engine. The compiler's caches know a provider by its plan's digest, since they
            would not see that what is behind its name has changed.
        by_range: whether vLLM compiles the model for each range of token counts apart, where our
            pass inlines what can be, before vLLM asks our provider for the rest.
    """
    register_provider()
    plan, digest = engine.plan, engine.digest
    direct: dict[str, Callable[..., Any]] = {}
    for op, of_op in ir_ops().items():
        last = stock_form(op, natives().get(op))
        is_ours = plan.mode == "compiled" and not plan.is_stock(op)
        chain = chain_of(plan, op, of_op) if is_ours else None
        run = None if chain is None else _compiled(plan, chain, by_range)
        for target in of_op:
            ir_op: IrOp = ir_op_of(target)
            ours = ir_op.impls[PROVIDER]
            native = ir_op.impls["native"].impl_fn
            _bound[target.name] = native if run is None else target.route(run.fn)
            # Such a provider may write over activations; vLLM copies what it still needs.
            ours.inplace = bool(ir_op.allow_inplace and run and run.consumes)
            ours.uuid = lambda: digest
        if plan.mode == "eager" and (call := plan.without_layer(op, last=last)) is not None:
            for target in of_op:
                direct[target.name] = _direct(engine, op, target, target.route(call))
    providers(engine).direct = {**_bound, **direct} if direct else {}


def natives() -> dict[str, Callable[..., Any] | None]:
    """Op -> vLLM's own form of it, as its layers compute it."""
    layers = reversed(targets(installed_bindings(), LayerTarget))
    return {op: target.native for op, target in layers}


def chain_of(plan: Plan, op: str, of_op: Iterable[IrTarget]) -> Chain:
    """The candidates of an op of vLLM's IR in compiled code.

    Args:
        plan: the plan.
        op: the op; it must not be stock.
        of_op: its targets in the IR.
    """
    grants = frozenset(name for target in of_op for name in target.grants)
    return plan.chain(op, grants, last=stock_form(op, natives().get(op)))


def _direct(
    engine: Engine, op: str, target: IrTarget, ours: Callable[..., Any]
) -> Callable[..., Any]:
    """`ours`, where no size is stock; otherwise what hands those to the provider behind ours.

    The contract's plain form would be slower there than what vLLM has.
    """
    is_stock = engine.plan.stock_at(op)
    if is_stock is None:
        return ours
    ir_op: IrOp = ir_op_of(target)
    behind = providers(engine).behind

    def by_size(*args: Any, **named: Any) -> Any:
        if not is_stock((args[0] if args else next(iter(named.values()))).shape[0]):
            return ours(*args, **named)
        for name in behind.get(target.name, ()):
            impl = ir_op.impls[name]
            if impl.supported and impl.supports_args(*args, **named):
                # A provider may write over its arguments; this form of it does not.
                return getattr(impl, "func_impl_fn", impl.impl_fn)(*args, **named)
        return ir_op.impls["native"].impl_fn(*args, **named)

    return by_size


def _compiled(plan: Plan, chain: Chain, by_range: bool) -> OpImpl:
    """The op by the contract's parameters, as compiled code calls it."""
    first = chain.impls[0]
    if chain.is_by_size or is_opaque(first):
        return opaque_op(chain, plan.place, rest_is_inlined=by_range)
    return dataclasses.replace(
        first, fn=_pure(plan.record.counting(first.fn, chain.op, first.impl_id))
    )


def _pure(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, without writes where vLLM traces it into a graph that has been functionalised.

    vLLM then removes copies of activations whose copy nothing writes to, and does not see what
    writes to a part of one.
    """
    pure = torch.func.functionalize(function, remove="mutations")

    def traced_or_called(*args: Any) -> Any:
        return (pure if isinstance(args[0], FakeTensor) else function)(*args)

    return traced_or_called


class Ir(Patcher):
    """Puts one provider of ours first among those of each op of vLLM's IR."""

    kind = IrTarget

    def ops(self) -> set[str]:
        return {*ir_ops()}

    def note_user(self, vllm_config: VllmConfig) -> dict[str, Any]:
        """Return what the user wrote in `ir_op_priority`: vLLM appends its defaults to it."""
        config = vllm_config.kernel_config.ir_op_priority
        names = [target.name for of_op in ir_ops().values() for target in of_op]
        return {"user_priority": {name: list(getattr(config, name, None) or ()) for name in names}}

    def request(
        self,
        vllm_config: VllmConfig,
        settings: Settings,
        noted: Mapping[str, Any],
        /,
        *,
        compiled: bool,
    ) -> dict[str, Any]:
        priority = noted.get("user_priority", {})
        return {"ir_priority": {op: tuple(names) for op, names in priority.items()}}

    def why_not(self, facts: EngineFacts) -> WhyNot:
        """Return the settings of vLLM's by which the user keeps an op as it is.

        vLLM's own passes that fuse an op see it only if it is no op of the IR.
        """
        notes: dict[str, str] = {}
        in_ir = ir_ops()
        for op, of_op in in_ir.items():
            for target in of_op:
                if first := facts.ir_priority.get(target.name):
                    notes[op] = f"ir_op_priority.{target.name} is {','.join(first)}"
        for op, binding in installed_bindings().items():
            fused = [name for name in binding.fused_by if name in facts.passes_on]
            if fused and facts.mode == "compiled" and op not in in_ir:
                notes[op] = f"vLLM's own fusions of it are on ({', '.join(fused)})"
        return WhyNot(notes)

    def by_range(self, plan: Plan) -> dict[str, Chain]:
        return {
            op: chain_of(plan, op, of_op)
            for op, of_op in ir_ops().items()
            if plan.mode == "compiled" and op in plan.entries and plan.entries[op].ceilings
        }

    def apply(self, engine: Engine) -> None:
        bind_provider(engine, by_range=engine.facts.by_range)
        reset_priorities(engine)
