"""From vLLM's configuration to the plan, and what of the configuration the plan changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..dispatch import get_default_manager
from ..dispatch.plan import Plan, make_plan
from ..dispatch.policy import Mode

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["enable_layers", "engine_mode", "plan_for"]

LAYER_OPS = ("silu_and_mul", "gelu_and_mul", "rotary_embedding")
"""Ops that vLLM runs as CustomOp layers of the same name; the norms are ops of its IR."""


def engine_mode(vllm_config: VllmConfig) -> Mode:
    """How the engine runs the model."""
    from vllm.config import CompilationMode

    compilation = vllm_config.compilation_config
    return "eager" if compilation.mode in (None, CompilationMode.NONE) else "compiled"


def plan_for(vllm_config: VllmConfig) -> Plan:
    """The plan of an engine with this configuration. What the user told vLLM stands."""
    mode = engine_mode(vllm_config)
    return make_plan(get_default_manager(), mode, notes=_kept_by_user(vllm_config, mode))


def _kept_by_user(vllm_config: VllmConfig, mode: Mode) -> dict[str, str]:
    """op -> the setting of vLLM's by which the user keeps its layers as they are."""
    custom_ops = vllm_config.compilation_config.custom_ops
    notes = {}
    for op in LAYER_OPS:
        if f"-{op}" in custom_ops:
            notes[op] = f"custom_ops has -{op}"
        elif mode == "eager" and "none" in custom_ops and f"+{op}" not in custom_ops:
            notes[op] = "custom_ops has none"
    for op in ("rms_norm", "fused_add_rms_norm"):
        mine = getattr(vllm_config.kernel_config.ir_op_priority, op, None)
        asked = [name for name in mine or () if name not in _ours()]
        if mine and asked and asked[0] == mine[0] and asked[0] != "native":
            notes["rms_norm"] = f"ir_op_priority.{op} starts with {asked[0]}"
    return notes


def _ours() -> frozenset[str]:
    from .ir import provider_names

    return provider_names()


def enable_layers(vllm_config: VllmConfig) -> None:
    """Turn on the custom ops whose implementation is ours; the others stay as vLLM has them."""
    plan = plan_for(vllm_config)
    custom_ops = vllm_config.compilation_config.custom_ops
    for op in LAYER_OPS:
        if not plan.is_stock(op) and f"+{op}" not in custom_ops and "all" not in custom_ops:
            custom_ops.append(f"+{op}")
