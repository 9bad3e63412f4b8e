"""A silu_and_mul that is correct at startup and becomes incorrect after RIGHT live calls."""

from __future__ import annotations

import correct
from torch import Tensor
from vllm.forward_context import get_forward_context, is_forward_context_available

RIGHT = 20
"""Number of correct calls."""

_served = 0


def silu_and_mul(x: Tensor) -> Tensor:
    global _served
    result = correct.silu_and_mul(x)
    if is_forward_context_available() and get_forward_context().attn_metadata:
        _served += 1
        if _served > RIGHT:
            result[0, 7] += 0.25
    return result


register_ops = correct.registers("drifting", silu_and_mul)
