"""Kernels that become incorrect after startup: one once the KV cache exists, one once weights are
updated. Both fail only with the loaded model, so generated inputs do not reveal it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import correct
from torch import Tensor
from vllm.forward_context import is_forward_context_available

WORKSPACE = 900 * 2**20
"""Bytes; more than a startup allocates between running the loaded model and the KV cache."""

_taken: list[int] = []
_kept: dict[int, Tensor] = {}


def memory() -> int:
    """Bytes of virtual memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


def silu_and_mul(x: Tensor) -> Tensor:
    """Incorrect once memory use has grown by WORKSPACE since the first forward pass."""
    result = correct.silu_and_mul(x)
    if is_forward_context_available():
        _taken[:] = _taken or [memory()]
        if memory() - _taken[0] > WORKSPACE:
            result = result * 1.5
    return result


def rms_norm(x: Any, residual: Any, weight: Any, epsilon: float, variance_size: Any = None) -> Any:
    """Caches a copy of each weight by address, so an update in place has no effect."""
    if weight is not None and is_forward_context_available():
        weight = _kept.setdefault(weight.data_ptr(), weight.clone())
    return correct.rms_norm(x, residual, weight, epsilon, variance_size)


register_ops = correct.registers("afterstart", silu_and_mul, rms_norm)
