"""An activation that supports only calls with more than two tokens."""

from __future__ import annotations

from torch import Tensor

from vllm_fl import Availability, BackendImplKind, OpImpl, hookimpl
from vllm_fl.plugins.registry import known_contracts


def silu_and_mul(x: Tensor) -> Tensor:
    result: Tensor = known_contracts().contracts["silu_and_mul"].oracle(x)
    return result.to(x.dtype)


def supports(x: Tensor) -> Availability:
    return len(x) > 2 or "two tokens, or fewer"


@hookimpl
def register_ops() -> list[OpImpl]:
    kind = BackendImplKind.VENDOR
    return [OpImpl("silu_and_mul", "vendor.many", kind, silu_and_mul, "many", supports=supports)]
