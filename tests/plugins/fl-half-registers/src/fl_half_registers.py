"""Plugin that yields one good implementation and then fails; the good one is rolled back."""

from __future__ import annotations

from vllm_fl.dispatch.types import BackendImplKind, OpImpl
from vllm_fl.hookspecs import hookimpl


def silu_and_mul(x):
    return x


@hookimpl
def register_ops():
    yield OpImpl("silu_and_mul", "vendor.half", BackendImplKind.VENDOR, silu_and_mul, "half")
    raise OSError("the device table of acme is missing")
