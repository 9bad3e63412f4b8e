"""What this distribution brings: the plugin that the entry point `cpu` names."""

from __future__ import annotations

from pathlib import Path

from vllm_fl import BackendImplKind, OpImpl, PolicyDefaults, hookimpl

from .impl import activation, normalization, provides, rotary

POLICY = Path(__file__).with_name("cpu.yaml")
VENDOR = ("vendor.cpu", BackendImplKind.VENDOR)


@hookimpl
def register_ops() -> list[OpImpl]:
    """The four ops as `vendor.cpu`; they run where vLLM's CPU build is installed."""
    return [
        OpImpl(
            "silu_and_mul",
            *VENDOR,
            activation.silu_and_mul,
            "cpu",
            available=provides("silu_and_mul"),
            supports=activation.supports_silu_and_mul,
        ),
        OpImpl(
            "gelu_and_mul",
            *VENDOR,
            activation.gelu_and_mul,
            "cpu",
            available=provides("gelu_and_mul", "gelu_tanh_and_mul"),
            supports=activation.supports_gelu_and_mul,
        ),
        OpImpl(
            "rms_norm",
            *VENDOR,
            normalization.rms_norm,
            "cpu",
            available=provides("rms_norm", "fused_add_rms_norm"),
            supports=normalization.supports_rms_norm,
            consumes=frozenset({"x", "residual"}),
        ),
        OpImpl(
            "rotary_embedding",
            *VENDOR,
            rotary.rotary_embedding,
            "cpu",
            available=provides("rotary_embedding"),
            supports=rotary.supports_rotary_embedding,
            consumes=frozenset({"query", "key"}),
        ),
    ]


@hookimpl
def policy(platform: str) -> PolicyDefaults | None:
    """The measured order per op for the CPU; nothing for another platform."""
    return PolicyDefaults(POLICY) if platform == "cpu" else None
