"""The norms of compiled engines: planned implementations as providers of vLLM's IR ops.

`rms_norm` and `fused_add_rms_norm` of `vllm.ir` are the contract's `rms_norm` without and with a
residual. vLLM lowers them while it compiles, to the provider that comes first. Eager engines do not
come here: their norms are layers bound to the plan (`layers.py`), as all others are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...dispatch import get_default_manager
from ...engine.opaque import is_opaque, opaque_op, unique_name
from ...engine.plan import Plan
from ...plugins.types import BackendImplKind, OpImpl

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["bind_provider", "native_norm", "prioritise", "provider_name", "register_providers"]

IR_OPS = ("rms_norm", "fused_add_rms_norm")

_bound: dict[str, Callable[..., Any]] = {}
"""Provider -> what it calls: what the plan made of it, for the engine that compiles next."""


def provider_name(impl_id: str) -> str:
    """An implementation's name in vLLM's IR: `fl_vendor_cpu_` and a hash of the id as it is."""
    return unique_name(f"fl_{impl_id}")


def _norms() -> list[OpImpl]:
    impls = get_default_manager().registry.snapshot().impls_by_op.get("rms_norm", ())
    return [impl for impl in impls if isinstance(impl, OpImpl) and not impl.needs_layer]


def register_providers() -> None:
    """Give every installed norm to vLLM as a provider, once per process.

    None that takes the layer is among them: an IR op has none to give.
    """
    from vllm import ir

    for impl in _norms():
        name = provider_name(impl.impl_id)
        if name in ir.ops.rms_norm.impls:
            continue
        _bound[name] = impl.fn
        plain, fused = _provider(name)
        available = impl.is_available()
        ir.ops.rms_norm.register_impl(name, supported=available)(plain)
        ir.ops.fused_add_rms_norm.register_impl(
            name, supported=available, inplace=bool(impl.consumes)
        )(fused)


def _provider(name: str) -> tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]]]:
    """The provider's functions. Their signatures are vLLM's: it compares them with its own.

    vLLM is told that they support every call: what refuses one is inside, in the plan's chain.
    """

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

    return plain, fused


def prioritise(default: Any, plan: Plan) -> Any:
    """vLLM's default priorities, in compiled mode with the plan's first choice in front.

    The other candidates of the plan are not named: they stand behind the first in its own chain.
    """
    impl = plan.entries["rms_norm"].impl
    if plan.mode == "compiled" and impl is not None:
        name = provider_name(impl.impl_id)
        for op in IR_OPS:
            setattr(default, op, [name, *(p for p in getattr(default, op) if p != name)])
    return default


def reset_priorities(plan: Plan, vllm_config: VllmConfig) -> None:
    """Give vLLM the priorities of the sealed plan: its worker installed those of the first one."""
    from vllm.config.kernel import IrOpPriorityConfig
    from vllm.platforms import current_platform

    if plan.entries["rms_norm"].note:
        return  # the user's own priority stands
    ours = {provider_name(impl.impl_id) for impl in _norms()}
    sealed = prioritise(current_platform.vllm_fl_stock_priority(vllm_config), plan)
    config: IrOpPriorityConfig = vllm_config.kernel_config.ir_op_priority
    for op in IR_OPS:
        kept = [p for p in getattr(config, op) if p not in ours and p not in getattr(sealed, op)]
        setattr(config, op, [*getattr(sealed, op), *kept])
    config.set_default()


def bind_provider(plan: Plan, digest: str) -> None:
    """Let the plan's first choice be what its provider calls, for the model that is compiled next.

    Args:
        plan: the sealed plan.
        digest: the plan's. The compiler's caches know a provider by it, since they would not see
            that what is behind its name has changed.
    """
    from vllm import ir

    for other in _norms():  # none keeps what an earlier plan made of it
        _bound[provider_name(other.impl_id)] = other.fn
    impl = plan.entries["rms_norm"].impl
    if plan.mode == "eager" or impl is None:
        return
    name = provider_name(impl.impl_id)
    if is_opaque(impl):
        # Of vLLM's providers these may write over activations; it copies what it still needs.
        chain = plan.chain("rms_norm", frozenset({"x", "residual"}), last=native_norm())
        _bound[name] = opaque_op(chain, plan.counting, plan.place).fn
    else:
        _bound[name] = plan.counting(impl.fn, "rms_norm", impl.impl_id)
    for op in IR_OPS:
        getattr(ir.ops, op).impls[name].uuid = lambda: digest


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
