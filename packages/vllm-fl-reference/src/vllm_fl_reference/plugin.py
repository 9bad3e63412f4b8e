"""The reference plugin: one function for each hook."""

from __future__ import annotations

from pathlib import Path

from vllm_fl import OpImpl, PolicyDefaults, hookimpl

from .impl import (
    activation,
    cache_writes,
    convolution,
    experts,
    gated_delta,
    linear,
    merging,
    normalization,
    qk_norm_rope,
    quantisation,
    rotary,
    routing,
)

POLICY = Path(__file__).with_name("reference.yaml")
WITH_KERNELS = frozenset({"cpu", "cuda", "rocm", "xpu"})
"""Platforms with kernels in vLLM."""

MODULES = (
    activation,
    convolution,
    experts,
    gated_delta,
    linear,
    merging,
    normalization,
    cache_writes,
    qk_norm_rope,
    quantisation,
    rotary,
    routing,
)
"""Modules with an `OPS` tuple."""


@hookimpl
def register_ops() -> list[OpImpl]:
    """Ops as `reference.torch`, available wherever PyTorch runs."""
    return [impl for module in MODULES for impl in module.OPS]


@hookimpl
def policy(platform: str) -> PolicyDefaults | None:
    """Orders with vLLM's code first for ops with kernels in vLLM; None if vLLM has no kernels."""
    return PolicyDefaults(POLICY) if platform in WITH_KERNELS else None
