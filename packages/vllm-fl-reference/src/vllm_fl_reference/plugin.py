"""What this distribution brings: the plugin that the entry point `reference` names."""

from __future__ import annotations

from pathlib import Path

from vllm_fl import OpImpl, PolicyDefaults, hookimpl

from .impl import (
    activation,
    convolution,
    experts,
    gated_delta,
    linear,
    merging,
    normalization,
    paging,
    qk_norm_rope,
    quantisation,
    rotary,
    routing,
)

POLICY = Path(__file__).with_name("reference.yaml")
WITH_KERNELS = frozenset({"cpu", "cuda", "rocm", "xpu"})
"""The platforms that vLLM itself has kernels for."""

MODULES = (
    activation,
    convolution,
    experts,
    gated_delta,
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
    """The ops as `reference.torch`; they run wherever PyTorch does."""
    return [impl for module in MODULES for impl in module.OPS]


@hookimpl
def policy(platform: str) -> PolicyDefaults | None:
    """vLLM's own code first for the ops that it has kernels of; nothing where it has none."""
    return PolicyDefaults(POLICY) if platform in WITH_KERNELS else None
