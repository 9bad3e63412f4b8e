"""Correct norm that does not support any call once requests are served."""

from __future__ import annotations

from typing import Any

import correct
from vllm.forward_context import get_forward_context, is_forward_context_available


def rms_norm(x: Any, residual: Any, weight: Any, epsilon: float, variance_size: Any = None) -> Any:
    if is_forward_context_available() and get_forward_context().attn_metadata:
        raise NotImplementedError("not while it serves")
    return correct.rms_norm(x, residual, weight, epsilon, variance_size)


register_ops = correct.registers("late", rms_norm)
