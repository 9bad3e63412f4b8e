"""What this distribution brings: the plugin that the entry point `cpu` names."""

from __future__ import annotations

from pathlib import Path

from vllm_fl import OpImpl, PolicyDefaults, hookimpl

from .impl import (
    activation,
    convolution,
    experts,
    gated_delta,
    normalization,
    paging,
    quantisation,
    rotary,
)

POLICY = Path(__file__).with_name("cpu.yaml")

MODULES = (
    activation,
    convolution,
    experts,
    gated_delta,
    normalization,
    paging,
    quantisation,
    rotary,
)
"""Those that bring ops, by theme."""


@hookimpl
def register_ops() -> list[OpImpl]:
    """The ops as `vendor.cpu`; they run where vLLM's CPU build is installed."""
    return [impl for module in MODULES for impl in module.OPS]


@hookimpl
def policy(platform: str) -> PolicyDefaults | None:
    """The measured order per op for the CPU; nothing for another platform."""
    return PolicyDefaults(POLICY) if platform == "cpu" else None
