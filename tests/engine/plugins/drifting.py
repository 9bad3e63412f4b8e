"""A silu_and_mul that is correct at startup and becomes incorrect after RIGHT live calls."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu
from vllm.forward_context import get_forward_context, is_forward_context_available

from vllm_fl import BackendImplKind, OpImpl, hookimpl

RIGHT = 20
"""Number of correct calls."""

_served = 0


def silu_and_mul(x: Tensor) -> Tensor:
    global _served
    half = x.shape[-1] // 2
    result = silu(x[..., :half]) * x[..., half:]
    if is_forward_context_available() and get_forward_context().attn_metadata:
        _served += 1
        if _served > RIGHT:
            result[0, 7] += 0.25
    return result


@hookimpl
def register_ops() -> list[OpImpl]:
    return [
        OpImpl("silu_and_mul", "vendor.drifting", BackendImplKind.VENDOR, silu_and_mul, "drifting")
    ]
