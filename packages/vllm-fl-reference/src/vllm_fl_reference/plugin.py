"""What this distribution brings: the plugin that the entry point `reference` names."""

from __future__ import annotations

from vllm_fl import OpImpl, hookimpl

from .impl import (
    activation,
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
    return [
        *activation.OPS,
        *experts.OPS,
        *gated_delta.OPS,
        *merging.OPS,
        *normalization.OPS,
        *paging.OPS,
        *qk_norm_rope.OPS,
        *quantisation.OPS,
        *rotary.OPS,
        *routing.OPS,
    ]
