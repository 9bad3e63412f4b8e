"""What this distribution brings: the plugin that the entry point `reference` names."""

from __future__ import annotations

from vllm_fl import OpImpl, hookimpl

from .impl import (
    activation,
    convolution,
    experts,
    gated_delta,
    merging,
    normalization,
    paging,
    qk_norm_rope,
    quantisation,
    rotary,
    routing,
)

MODULES = (
    activation,
    convolution,
    experts,
    gated_delta,
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
