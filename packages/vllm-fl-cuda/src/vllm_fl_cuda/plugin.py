"""What this distribution brings: the plugin that the entry point `cuda` names."""

from __future__ import annotations

from pathlib import Path

from vllm_fl import BackendImplKind, OpImpl, PolicyDefaults, hookimpl

from .impl import activation, normalization, provides, rotary

POLICY = Path(__file__).with_name("cuda.yaml")
VENDOR = ("vendor.cuda", BackendImplKind.VENDOR)


@hookimpl
def register_ops() -> list[OpImpl]:
    """The four ops as `vendor.cuda`; they run where vLLM's CUDA build and an NVIDIA GPU are."""
    return [
        OpImpl(
            "silu_and_mul",
            *VENDOR,
            activation.silu_and_mul,
            "cuda",
            available=provides("silu_and_mul"),
            supports=activation.supports_silu_and_mul,
        ),
        OpImpl(
            "gelu_and_mul",
            *VENDOR,
            activation.gelu_and_mul,
            "cuda",
            available=provides("gelu_and_mul", "gelu_tanh_and_mul"),
            supports=activation.supports_gelu_and_mul,
        ),
        OpImpl(
            "rms_norm",
            *VENDOR,
            normalization.rms_norm,
            "cuda",
            available=provides("rms_norm", "fused_add_rms_norm"),
            supports=normalization.supports_rms_norm,
            consumes=frozenset({"x", "residual"}),
        ),
        OpImpl(
            "rotary_embedding",
            *VENDOR,
            rotary.rotary_embedding,
            "cuda",
            available=provides("rotary_embedding"),
            supports=rotary.supports_rotary_embedding,
            consumes=frozenset({"query", "key"}),
        ),
    ]


@hookimpl
def policy(platform: str) -> PolicyDefaults | None:
    """The measured order per op for NVIDIA GPUs; nothing for another platform."""
    return PolicyDefaults(POLICY) if platform == "cuda" else None
