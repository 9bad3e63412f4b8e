"""The CUDA plugin: one function for each hook."""

from __future__ import annotations

from pathlib import Path

from vllm_fl import OpImpl, PolicyDefaults, hookimpl

from .impl import (
    activation,
    cache_writes,
    linear,
    merging,
    normalization,
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
    cache_writes,
    qk_norm_rope,
    quantisation,
    rotary,
    routing,
)
"""Modules with an `OPS` tuple."""


@hookimpl
def register_ops() -> list[OpImpl]:
    """Ops as `vendor.cuda`, available with vLLM's CUDA build and an NVIDIA GPU."""
    return [impl for module in MODULES for impl in module.OPS]


@hookimpl
def policy(platform: str) -> PolicyDefaults | None:
    """Default orders, measured on NVIDIA GPUs; None for other platforms."""
    return PolicyDefaults(POLICY) if platform == "cuda" else None
