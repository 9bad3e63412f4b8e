"""What this distribution brings: the plugin that the entry point `reference` names."""

from __future__ import annotations

from vllm_fl import OpImpl, hookimpl

from .impl import activation, normalization, quantisation, rotary


@hookimpl
def register_ops() -> list[OpImpl]:
    """The ops as `reference.torch`; they run wherever PyTorch does."""
    return [*activation.OPS, *normalization.OPS, *quantisation.OPS, *rotary.OPS]
