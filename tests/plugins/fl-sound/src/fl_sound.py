"""A plugin with nothing wrong about it: what must go on working beside the others."""

from __future__ import annotations

from vllm_fl.dispatch.types import BackendImplKind, OpImpl
from vllm_fl.hookspecs import hookimpl


def silu_and_mul(x):
    return x


@hookimpl
def register_ops():
    return [OpImpl("silu_and_mul", "vendor.sound", BackendImplKind.VENDOR, silu_and_mul, "sound")]
