"""A plugin that was written for another version of the hooks."""

from __future__ import annotations

from vllm_fl.dispatch.types import BackendImplKind, OpImpl
from vllm_fl.hookspecs import hookimpl

HOOK_API = 99


def silu_and_mul(x):
    return x


@hookimpl
def register_ops():
    return [OpImpl("silu_and_mul", "vendor.later", BackendImplKind.VENDOR, silu_and_mul, "later")]
