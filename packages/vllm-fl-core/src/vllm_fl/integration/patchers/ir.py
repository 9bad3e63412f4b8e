"""Ops of vLLM's IR: a provider of ours stands for the plan in compiled code.

vLLM lowers an IR op while it compiles, to the first provider that supports the call. Ours calls
what the plan of the compiling engine has made of the op. In eager engines the IR is vLLM's: norms
are layers bound to the plan (`layers.py`) there.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ...contracts.binding import IrTarget, LayerTarget
from ...dispatch.chain import Chain
from ...engine.facts import EngineFacts
from ...engine.opaque import is_opaque, opaque_op
from ...engine.plan import Plan
from ...plugins.types import OpImpl
from ..engines import Engine, now
from ..patcher import Patcher, WhyNot
from ..targets import installed_bindings, stock_form, targets

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.ir.op import IrOp

PROVIDER = "vllm_fl"
"""Our name among the providers of an IR op."""


def ir_ops() -> dict[str, list[IrTarget]]:
    """Return op -> its targets in the IR of this vLLM."""
    from vllm import ir

    found: dict[str, list[IrTarget]] = {}
    for op, target in targets(installed_bindings(), IrTarget):
        if hasattr(ir.ops, target.name):
            found.setdefault(op, []).append(target)
    return found


def ir_op_of(target: IrTarget) -> Any:
    """Return vLLM's IR op of one of the targets of `ir_ops`."""
    from vllm import ir

    return getattr(ir.ops, target.name)


def register_provider() -> None:
    """Give vLLM our provider of each IR op that a binding names, once per process.

    The provider supports every call: the plan's chain inside decides.
    """
    for of_op in ir_ops().values():
        for target in of_op:
            op: IrOp = ir_op_of(target)
            if PROVIDER not in op.impls:
                op.register_impl(PROVIDER, supported=True)(_provider(target.name, op))


def _provider(name: str, op: Any) -> Callable[..., Any]:
    """Return the provider's function. vLLM compares its signature with the IR op's."""
    native = op.impls["native"].impl_fn

    def vllm_fl(*args: Any, **named: Any) -> Any:
        engine = now()
        planned = {} if engine is None else engine.state.get(Ir, {})
        return planned.get(name, native)(*args, **named)

    vllm_fl.__signature__ = inspect.signature(native)  # type: ignore[attr-defined]
    return vllm_fl


def prioritise(default: Any, plan: Plan) -> Any:
    """Return vLLM's default priorities with our provider first for the planned ops.

    If verification disables all implementations of an op, the provider runs vLLM's native code.
    """
    for op, of_op in ir_ops().items():
        if plan.mode == "compiled" and not plan.is_stock(op):
            for target in of_op:
                others = [p for p in getattr(default, target.name) if p != PROVIDER]
                setattr(default, target.name, [PROVIDER, *others])
    return default


def chain_of(plan: Plan, op: str, of_op: Iterable[IrTarget | LayerTarget]) -> Chain:
    """Return the candidates of an op in compiled code, the last one as vLLM's layers compute it.

    Args:
        plan: the plan.
        op: the op; it must not be stock.
        of_op: its targets.
    """
    layers = targets(installed_bindings(), LayerTarget)
    native = next((target.native for of, target in layers if of == op), None)
    grants = frozenset(name for target in of_op for name in target.grants)
    return plan.chain(op, grants, last=stock_form(op, native))


def _compiled(plan: Plan, chain: Chain, by_range: bool) -> OpImpl:
    """Return the op by the contract's parameters, as compiled code calls it."""
    first = chain.impls[0]
    if chain.is_by_size or is_opaque(first):
        return opaque_op(chain, plan.place, rest_is_inlined=by_range)
    return dataclasses.replace(
        first, fn=_pure(plan.record.counting(first.fn, chain.op, first.impl_id))
    )


def _pure(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` without writes if vLLM traces it into a functionalised graph.

    vLLM then removes copies of activations whose copy nothing writes to, and does not see a write
    to a part of one.
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
        return {"ir_priority": {name: list(getattr(config, name, None) or ()) for name in names}}

    def why_not(self, facts: EngineFacts) -> WhyNot:
        """Return the priorities by which the user keeps an op as it is."""
        notes: dict[str, str] = {}
        for op, of_op in ir_ops().items():
            for target in of_op:
                if first := facts.ir_priority.get(target.name):
                    notes[op] = f"ir_op_priority.{target.name} is {','.join(first)}"
        return WhyNot(notes)

    def by_range(self, plan: Plan) -> dict[str, Chain]:
        return {
            op: chain_of(plan, op, of_op)
            for op, of_op in ir_ops().items()
            if plan.mode == "compiled" and op in plan.entries and plan.entries[op].ceilings
        }

    def apply(self, engine: Engine) -> None:
        """Let our provider call what the plan has made of each op, for this engine.

        The compiler's caches know a provider by the digest of its plan, since the provider's name
        stays the same.
        """
        register_provider()
        plan, digest, by_range = engine.plan, engine.digest, engine.facts.by_range
        planned: dict[str, Callable[..., Any]] = {}
        for op, of_op in ir_ops().items():
            is_ours = plan.mode == "compiled" and not plan.is_stock(op)
            run = _compiled(plan, chain_of(plan, op, of_op), by_range) if is_ours else None
            for target in of_op:
                ir_op: IrOp = ir_op_of(target)
                ours = ir_op.impls[PROVIDER]
                if run is not None:
                    planned[target.name] = target.route(run.fn)
                # Such a provider may write over activations; vLLM copies what it still needs.
                ours.inplace = bool(ir_op.allow_inplace and run and run.consumes)
                ours.uuid = lambda: digest
        engine.state[Ir] = planned
