"""What this distribution brings: the plugin that the entry point `cuda` names."""

from __future__ import annotations

from pathlib import Path

from vllm_fl import OpImpl, PolicyDefaults, hookimpl

from .impl import (
    activation,
    linear,
    merging,
    normalization,
    paging,
    qk_norm_rope,
    quantisation,
    rotary,
    routing,
)

POLICY = Path(__file__).with_name("cuda.yaml")

MODULES = (
    activation,
    linear,
    merging,
    normalization,
    paging,
    qk_norm_rope,
    quantisation,
    rotary,
    routing,
)
"""Those that bring ops, by theme."""


@hookimpl
def register_ops() -> list[OpImpl]:
    """The ops as `vendor.cuda`; they run where vLLM's CUDA build and an NVIDIA GPU are."""
    return [impl for module in MODULES for impl in module.OPS]


@hookimpl
def policy(platform: str) -> PolicyDefaults | None:
    """The measured order per op for NVIDIA GPUs; nothing for another platform."""
    return PolicyDefaults(POLICY) if platform == "cuda" else None
