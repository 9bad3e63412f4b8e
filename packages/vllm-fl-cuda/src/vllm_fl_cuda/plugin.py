"""What this distribution brings: the plugin that the entry point `cuda` names."""

from __future__ import annotations

from pathlib import Path

from vllm_fl import OpImpl, PolicyDefaults, hookimpl

from .impl import activation, normalization, quantisation, rotary

POLICY = Path(__file__).with_name("cuda.yaml")


@hookimpl
def register_ops() -> list[OpImpl]:
    """The ops as `vendor.cuda`; they run where vLLM's CUDA build and an NVIDIA GPU are."""
    return [*activation.OPS, *normalization.OPS, *quantisation.OPS, *rotary.OPS]


@hookimpl
def policy(platform: str) -> PolicyDefaults | None:
    """The measured order per op for NVIDIA GPUs; nothing for another platform."""
    return PolicyDefaults(POLICY) if platform == "cuda" else None
