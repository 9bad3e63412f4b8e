"""What this distribution brings: the plugin that the entry point `reference` names."""

from __future__ import annotations

from vllm_fl import BackendImplKind, OpImpl, hookimpl

from .impl.activation import gelu_and_mul, silu_and_mul
from .impl.normalization import rms_norm
from .impl.rotary import rotary_embedding


@hookimpl
def register_ops() -> list[OpImpl]:
    """The four ops as `reference.torch`; they run wherever PyTorch does."""
    ops = (silu_and_mul, gelu_and_mul, rms_norm, rotary_embedding)
    return [
        OpImpl(op.__name__, "reference.torch", BackendImplKind.REFERENCE, op, traceable=True)
        for op in ops
    ]
