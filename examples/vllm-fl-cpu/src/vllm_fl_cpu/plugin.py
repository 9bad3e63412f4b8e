"""The plugin of the entry point `cpu`: its implementations and its default orders."""

from __future__ import annotations

from pathlib import Path

from vllm_fl import BackendImplKind, LinearKernelImpl, OpImpl, PolicyDefaults, hookimpl

from .impl import (
    activation,
    cache_writes,
    convolution,
    experts,
    gated_delta,
    normalization,
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
    cache_writes,
    quantisation,
    rotary,
)
"""Modules that define implementations, in `OPS`."""


@hookimpl
def register_ops() -> list[OpImpl]:
    """Return the `vendor.cpu` implementations, available with vLLM's CPU build."""
    return [impl for module in MODULES for impl in module.OPS]


@hookimpl
def linear_kernels() -> list[LinearKernelImpl]:
    """Return the classes for quantised linear layers. `impl/linear.py` imports vLLM, so it is
    imported only when a class is chosen."""
    module, kind = "vllm_fl_cpu.impl.linear", BackendImplKind.VENDOR
    return [
        LinearKernelImpl("int8", f"{module}.Int8Linear", kind, "cpu"),
        LinearKernelImpl("wna16", f"{module}.WNA16Linear", kind, "cpu"),
    ]


@hookimpl
def policy(platform: str) -> PolicyDefaults | None:
    """Return the measured orders for the CPU; None for other platforms."""
    return PolicyDefaults(POLICY) if platform == "cpu" else None
