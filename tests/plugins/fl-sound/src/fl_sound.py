"""Sound plugin, which must keep working next to the broken ones."""

from __future__ import annotations

from vllm_fl.dispatch.types import BackendImplKind, OpImpl
from vllm_fl.hookspecs import hookimpl


def silu_and_mul(x):
    return x


@hookimpl
def register_ops():
    return [OpImpl("silu_and_mul", "vendor.sound", BackendImplKind.VENDOR, silu_and_mul, "sound")]
