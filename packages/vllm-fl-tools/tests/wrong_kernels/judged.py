"""Plugin that runs the kernel under test for its op, and correct kernels for the other ops.

An engine is bound to the plugin once; `serving.py` exchanges the kernel.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vllm_fl import BackendImplKind, OpImpl, hookimpl

from . import right

__all__ = ["OPS", "VENDOR", "judge", "refuse", "register_ops"]

VENDOR = "judged"

_now: dict[str, OpImpl] = {}


def judge(impl: OpImpl) -> None:
    """Run this kernel for all later calls of its op."""
    _now[impl.op_name] = impl


def refuse() -> None:
    """Decline all later calls, so that vLLM's implementations run."""
    for op in OPS:
        _now[op] = OpImpl(op, "vendor.none", BackendImplKind.VENDOR, _refuses, "none")


def _refuses(*args: Any) -> Any:
    raise NotImplementedError("vLLM's implementation is under test")


def _call(op: str, *args: Any) -> Any:
    if op not in _now:
        return getattr(right, op)(*args)
    impl = _now[op]
    reason = True if impl.supports is None else impl.supports(*args)
    if reason is not True:
        raise NotImplementedError(reason)
    return impl.fn(*args)


def silu_and_mul(x: Tensor) -> Any:
    return _call("silu_and_mul", x)


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Any:
    return _call("gelu_and_mul", x, approximate)


def rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> Any:
    return _call("rms_norm", x, residual, weight, epsilon, variance_size)


def rotary_embedding(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    rotary_interleaved: bool = False,
) -> Any:
    return _call("rotary_embedding", query, key, cos, sin, position_ids, rotary_interleaved)


OPS = {fn.__name__: fn for fn in (silu_and_mul, gelu_and_mul, rms_norm, rotary_embedding)}


@hookimpl
def register_ops() -> list[OpImpl]:
    vendor = BackendImplKind.VENDOR
    return [OpImpl(op, f"vendor.{VENDOR}", vendor, fn, VENDOR) for op, fn in OPS.items()]
