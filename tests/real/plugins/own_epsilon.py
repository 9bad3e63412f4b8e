"""Backend with norms that use OWN_EPSILON instead of the model's epsilon."""

from __future__ import annotations

import os
from typing import Any

from vllm_fl import BackendImplKind, OpImpl, hookimpl
from vllm_fl_reference.impl import normalization

EPSILON = float(os.environ["OWN_EPSILON"])


def rms_norm(x: Any, residual: Any, weight: Any, epsilon: float, variance_size: Any = None) -> Any:
    return normalization.rms_norm(x, residual, weight, EPSILON, variance_size)


@hookimpl
def register_ops() -> list[OpImpl]:
    kind = BackendImplKind.VENDOR
    return [OpImpl("rms_norm", "vendor.ownepsilon", kind, rms_norm, "ownepsilon")]
