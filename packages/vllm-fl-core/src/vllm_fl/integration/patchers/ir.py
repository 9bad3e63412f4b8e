"""Register a provider of vLLM IR ops that runs the plan in compiled code.

While it compiles, vLLM lowers an IR op to the first provider that supports the call. vllm-fl's
provider calls the planned op of the engine that compiles. Eager engines do not use the provider,
because norms are layers that are bound to the plan (`layers.py`).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ...contracts.binding import IrTarget, LayerTarget
from ...engine.facts import EngineFacts
from ...engine.opaque import is_opaque, opaque_op
from ...engine.plan import Plan
from ...plugins.types import OpImpl
from ..engines import Engine, calling_engine
from ..patcher import Patcher, WhyNot
from ..targets import installed_bindings, stock_form, targets

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.ir.op import IrOp

PROVIDER = "vllm_fl"


def ir_ops() -> dict[str, list[IrTarget]]:
    from vllm import ir

    found: dict[str, list[IrTarget]] = {}
    for op, target in targets(installed_bindings(), IrTarget):
        if hasattr(ir.ops, target.name):
            found.setdefault(op, []).append(target)
    return found


def ir_op_of(target: IrTarget) -> Any:
    from vllm import ir

    return getattr(ir.ops, target.name)


def register_provider() -> None:
    """Register vllm-fl's provider of each IR op that has a binding, once per process. It supports
    every call, because the plan's chain handles unsupported calls."""
    for of_op in ir_ops().values():
        for target in of_op:
            op: IrOp = ir_op_of(target)
            if PROVIDER not in op.impls:
                op.register_impl(PROVIDER, supported=True)(_provider(target.name, op))


def _provider(name: str, op: Any) -> Callable[..., Any]:
    native = op.impls["native"].impl_fn

    def vllm_fl(*args: Any, **named: Any) -> Any:
        engine = calling_engine()
        planned = {} if engine is None else engine.state.get(Ir, {})
        return planned.get(name, native)(*args, **named)

    vllm_fl.__signature__ = inspect.signature(native)  # type: ignore[attr-defined]
    return vllm_fl


def prioritise(default: Any, plan: Plan) -> Any:
    """Return vLLM's default priorities with vllm-fl's provider first for planned ops. If
    verification disables all implementations of an op, the provider runs vLLM's native code."""
    for op, of_op in ir_ops().items():
        if plan.mode == "compiled" and not plan.is_stock(op):
            for target in of_op:
                others = [p for p in getattr(default, target.name) if p != PROVIDER]
                setattr(default, target.name, [PROVIDER, *others])
    return default


def _compiled(plan: Plan, op: str, of_op: Iterable[IrTarget]) -> OpImpl:
    """Return an op that is not stock as compiled code runs it. The last candidate is vLLM's layer
    code. `of_op` are the op's targets."""
    layers = targets(installed_bindings(), LayerTarget)
    native = next((target.native for of, target in layers if of == op), None)
    grants = frozenset(name for target in of_op for name in target.grants)
    chain = plan.chain(op, grants, last=stock_form(op, native))
    first = chain.impls[0]
    if chain.is_by_size or is_opaque(first):
        return opaque_op(chain, plan.number)
    return dataclasses.replace(
        first, fn=_pure(plan.record.counting(first.fn, chain.op, first.impl_id))
    )


def _pure(function: Callable[..., Any]) -> Callable[..., Any]:
    """Remove mutations from `function` when vLLM traces it into a functionalised graph. vLLM
    removes a copy of an activation if nothing writes to the copy, but does not detect a write to a
    part of it."""
    pure = torch.func.functionalize(function, remove="mutations")

    def traced_or_called(*args: Any) -> Any:
        return (pure if isinstance(args[0], FakeTensor) else function)(*args)

    return traced_or_called


class Ir(Patcher):
    kind = IrTarget

    def ops(self) -> set[str]:
        return {*ir_ops()}

    def note_user(self, vllm_config: VllmConfig) -> dict[str, Any]:
        config = vllm_config.kernel_config.ir_op_priority
        names = [target.name for of_op in ir_ops().values() for target in of_op]
        return {"ir_priority": {name: list(getattr(config, name, None) or ()) for name in names}}

    def why_not(self, facts: EngineFacts) -> WhyNot:
        notes: dict[str, str] = {}
        for op, of_op in ir_ops().items():
            for target in of_op:
                if first := facts.ir_priority.get(target.name):
                    notes[op] = f"ir_op_priority.{target.name} is {','.join(first)}"
        return WhyNot(notes)

    def apply(self, engine: Engine) -> None:
        """Set the functions that vllm-fl's provider calls for this engine. The plan's digest is the
        provider's key in compile caches, because its name never changes."""
        register_provider()
        plan, digest = engine.plan, engine.digest
        planned: dict[str, Callable[..., Any]] = {}
        for op, of_op in ir_ops().items():
            is_ours = plan.mode == "compiled" and not plan.is_stock(op)
            run = _compiled(plan, op, of_op) if is_ours else None
            for target in of_op:
                ir_op: IrOp = ir_op_of(target)
                ours = ir_op.impls[PROVIDER]
                if run is not None:
                    planned[target.name] = target.route(run.fn)
                # It may then overwrite activations. vLLM copies activations that it still needs.
                ours.inplace = bool(ir_op.allow_inplace and run and run.consumes)
                ours.uuid = lambda: digest
        engine.state[Ir] = planned
