"""What this distribution brings: the plugin that the entry point `reference` names."""

from __future__ import annotations

from vllm_fl import OpImpl, hookimpl

from .impl import activation, convolution, gated_delta, normalization, quantisation, rotary


@hookimpl
def register_ops() -> list[OpImpl]:
    """The ops as `reference.torch`; they run wherever PyTorch does."""
    return [
        *activation.OPS,
        *convolution.OPS,
        *gated_delta.OPS,
        *normalization.OPS,
        *quantisation.OPS,
        *rotary.OPS,
    ]
