"""The norms: installed implementations as providers of vLLM's IR ops.

`rms_norm` and `fused_add_rms_norm` of `vllm.ir` are the contract's `rms_norm` without and with a
residual. Inside the engine the reference is PyTorch, which for these ops is vLLM's own `native`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..dispatch import get_default_manager
from ..dispatch.opaque import is_opaque, opaque_op
from ..dispatch.plan import Plan
from ..dispatch.types import BackendImplKind, OpImpl

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["bind_providers", "native_norm", "prioritise", "provider_names", "register_providers"]

IR_OPS = ("rms_norm", "fused_add_rms_norm")

_bound: dict[str, Callable[..., Any]] = {}
"""Provider -> what it calls: the plan's, once the worker has one."""


def provider_name(impl: OpImpl) -> str:
    """An implementation's id as vLLM's IR spells names: `fl_vendor_cpu`."""
    return "fl_" + re.sub(r"[^a-z0-9_]", "_", impl.impl_id.lower())


def _norms() -> list[OpImpl]:
    impls = get_default_manager().registry.snapshot().impls_by_op.get("rms_norm", ())
    return [
        i
        for i in impls
        if isinstance(i, OpImpl) and not i.needs_layer and i.kind is not BackendImplKind.REFERENCE
    ]


def provider_names() -> frozenset[str]:
    """The names of the providers that are ours."""
    return frozenset(provider_name(impl) for impl in _norms())


def register_providers() -> None:
    """Give every installed norm to vLLM as a provider, once per process."""
    from vllm import ir

    for impl in _norms():
        name = provider_name(impl)
        if name in ir.ops.rms_norm.impls:
            continue
        plain, fused, supports_plain, supports_fused = _provider(impl, name)
        available = impl.is_available()
        ir.ops.rms_norm.register_impl(name, supported=available, supports_args=supports_plain)(
            plain
        )
        ir.ops.fused_add_rms_norm.register_impl(
            name, supported=available, supports_args=supports_fused, inplace=bool(impl.consumes)
        )(fused)


def _provider(impl: OpImpl, name: str) -> tuple[Callable[..., Any], ...]:
    """The provider's functions. Their signatures are vLLM's: it compares them with its own."""
    _bound[name] = impl.fn

    def plain(
        x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> Tensor:
        result: Tensor = _bound[name](x, None, weight, epsilon, variance_size)
        return result

    def fused(
        x: Tensor,
        x_residual: Tensor,
        weight: Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = _bound[name](x, x_residual, weight, epsilon, variance_size)
        return result

    supports = impl.supports
    if supports is None:
        return plain, fused, None, None  # type: ignore[return-value]

    def supports_plain(
        x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> bool:
        return supports(x, None, weight, epsilon, variance_size) is True

    def supports_fused(
        x: Tensor,
        x_residual: Tensor,
        weight: Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> bool:
        return supports(x, x_residual, weight, epsilon, variance_size) is True

    return plain, fused, supports_plain, supports_fused


def prioritise(default: Any, plan: Plan) -> Any:
    """vLLM's default priorities with the plan's providers in front, in the plan's order."""
    names: list[str] = []
    for impl in plan.entries["rms_norm"].impls:
        if impl.kind is BackendImplKind.REFERENCE:
            names.append("native")
            break
        names.append(provider_name(impl))
    if names:
        for op in IR_OPS:
            rest = [p for p in getattr(default, op) if p not in names]
            setattr(default, op, [*names, *(rest if "native" not in names else ())])
    return default


def reset_priorities(plan: Plan, vllm_config: VllmConfig) -> None:
    """Give vLLM the priorities of the sealed plan: its worker installed those of the first one."""
    from vllm.config.kernel import IrOpPriorityConfig
    from vllm.platforms import current_platform

    if plan.entries["rms_norm"].note:
        return  # the user's own priority stands
    ours = provider_names()
    sealed = prioritise(current_platform.vllm_fl_stock_priority(vllm_config), plan)
    config: IrOpPriorityConfig = vllm_config.kernel_config.ir_op_priority
    for op in IR_OPS:
        kept = [p for p in getattr(config, op) if p not in ours and p not in getattr(sealed, op)]
        setattr(config, op, [*getattr(sealed, op), *kept])
    config.set_default()


def bind_providers(plan: Plan) -> None:
    """Let the providers call what the plan says, for the model that is built next."""
    _count_native(plan)
    for impl in _norms():
        if impl not in plan.entries["rms_norm"].impls:
            continue
        if plan.mode == "eager":
            # vLLM has asked `supports` just before: the implementation itself is enough.
            bound = plan.counting(impl.fn, "rms_norm", impl.impl_id)
        elif is_opaque(impl):
            # Of vLLM's providers these may write over activations; it copies what it still needs.
            grants = frozenset({"x", "residual"})
            bound = opaque_op(
                plan.chain("rms_norm", grants, first=impl, last=native_norm()), plan.counting
            ).fn
        else:
            bound = impl.fn
        _bound[provider_name(impl)] = bound


def _count_native(plan: Plan) -> None:
    """Count vLLM's native norms as the reference that they are to us, where counting is on."""
    from vllm import ir

    impl = plan.entries["rms_norm"].impl
    for op in IR_OPS:
        native = getattr(ir.ops, op).impls["native"]
        native.impl_fn = original = _native.setdefault(op, native.impl_fn)
        if plan.counts_calls and impl is not None and impl.kind is BackendImplKind.REFERENCE:
            native.impl_fn = plan.counting(original, "rms_norm", impl.impl_id)


_native: dict[str, Callable[..., Any]] = {}
"""IR op -> vLLM's native function, as it was before anything counted it."""


def native_norm() -> OpImpl:
    """vLLM's own norm in the contract's form."""
    from vllm import ir

    plain = ir.ops.rms_norm.impls["native"].impl_fn
    fused = ir.ops.fused_add_rms_norm.impls["native"].impl_fn

    def rms_norm(
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> Any:
        if residual is None:
            return plain(x, weight, epsilon, variance_size)
        return fused(x, residual, weight, epsilon, variance_size)

    return OpImpl("rms_norm", "stock.vllm", BackendImplKind.REFERENCE, rms_norm, traceable=True)
