"""An activation that supports only calls with more than two tokens."""

from __future__ import annotations

from correct import silu_and_mul
from torch import Tensor

from vllm_fl import Availability, BackendImplKind, OpImpl, hookimpl


def supports(x: Tensor) -> Availability:
    return len(x) > 2 or "two tokens, or fewer"


@hookimpl
def register_ops() -> list[OpImpl]:
    kind = BackendImplKind.VENDOR
    return [OpImpl("silu_and_mul", "vendor.many", kind, silu_and_mul, "many", supports=supports)]
