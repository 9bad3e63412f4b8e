"""A plugin whose operators are whatever kernel is judged at the moment, or right ones.

An engine is bound to it once; the kernel behind it is exchanged (`serving.py`).
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
    """Let this kernel answer the calls of its op from now on."""
    _now[impl.op_name] = impl


def refuse() -> None:
    """Leave every call to vLLM's own form from now on."""
    for op in OPS:
        _now[op] = OpImpl(op, "vendor.none", BackendImplKind.VENDOR, _refuses, "none")


def _refuses(*args: Any) -> Any:
    raise NotImplementedError("vLLM's own form is asked for")


def _call(op: str, *args: Any) -> Any:
    if op not in _now:
        return getattr(right, op)(*args)
    impl = _now[op]
    reason = True if impl.supports is None else impl.supports(*args)
    if reason is not True:
        raise NotImplementedError(reason)
    return impl.fn(*args)


def silu_and_mul(x: Tensor) -> Any:
    """The judged one."""
    return _call("silu_and_mul", x)


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Any:
    """The judged one."""
    return _call("gelu_and_mul", x, approximate)


def rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> Any:
    """The judged one."""
    return _call("rms_norm", x, residual, weight, epsilon, variance_size)


def rotary_embedding(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    rotary_interleaved: bool = False,
) -> Any:
    """The judged one."""
    return _call("rotary_embedding", query, key, cos, sin, position_ids, rotary_interleaved)


OPS = {fn.__name__: fn for fn in (silu_and_mul, gelu_and_mul, rms_norm, rotary_embedding)}


@hookimpl
def register_ops() -> list[OpImpl]:
    """One for each op."""
    vendor = BackendImplKind.VENDOR
    return [OpImpl(op, f"vendor.{VENDOR}", vendor, fn, VENDOR) for op, fn in OPS.items()]
