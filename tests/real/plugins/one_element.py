"""Backend with norms that triple one element in 9 973."""

from __future__ import annotations

from typing import Any

from vllm_fl import BackendImplKind, OpImpl, hookimpl
from vllm_fl_reference.impl import normalization

STEP = 9973


def rms_norm(x: Any, residual: Any, weight: Any, epsilon: float, variance_size: Any = None) -> Any:
    found = normalization.rms_norm(x, residual, weight, epsilon, variance_size)
    normed = found if residual is None else found[0]
    normed.view(-1)[STEP // 2 :: STEP] *= 3
    return found


@hookimpl
def register_ops() -> list[OpImpl]:
    kind = BackendImplKind.VENDOR
    return [OpImpl("rms_norm", "vendor.oneelement", kind, rms_norm, "oneelement")]
