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


@hookimpl
def register_ops() -> list[OpImpl]:
    """The ops as `reference.torch`; they run wherever PyTorch does."""
    modules = (
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
    return [impl for module in modules for impl in module.OPS]
