"""A plugin whose rms_norm has other parameters than the contract, beside a sound silu_and_mul."""

from __future__ import annotations

from vllm_fl.dispatch.types import BackendImplKind, OpImpl
from vllm_fl.hookspecs import hookimpl


def silu_and_mul(x):
    return x


def rms_norm(x, weight, eps=1e-6):
    return x


@hookimpl
def register_ops():
    return [
        OpImpl("silu_and_mul", "vendor.acme", BackendImplKind.VENDOR, silu_and_mul, "acme"),
        OpImpl("rms_norm", "vendor.acme", BackendImplKind.VENDOR, rms_norm, "acme"),
    ]
