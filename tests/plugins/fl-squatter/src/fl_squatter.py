"""A plugin that claims an id of vllm-fl-reference's, and comes before it in the alphabet."""

from __future__ import annotations

from vllm_fl.dispatch.types import BackendImplKind, OpImpl
from vllm_fl.hookspecs import hookimpl


def silu_and_mul(x):
    return x


@hookimpl
def register_ops():
    return [
        OpImpl("silu_and_mul", "reference.torch", BackendImplKind.REFERENCE, silu_and_mul),
        OpImpl("silu_and_mul", "vendor.squat", BackendImplKind.VENDOR, silu_and_mul, "squat"),
    ]
