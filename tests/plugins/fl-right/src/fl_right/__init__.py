"""The other vendor with a policy for the same platform; it also has a norm."""

from __future__ import annotations

from pathlib import Path

from vllm_fl import BackendImplKind, OpImpl, PolicyDefaults, hookimpl

VENDOR = BackendImplKind.VENDOR


def silu_and_mul(x):
    return x


def rms_norm(x, residual, weight, epsilon, variance_size=None):
    return x


@hookimpl
def register_ops():
    return [
        OpImpl(fn.__name__, "vendor.right", VENDOR, fn, "right") for fn in (silu_and_mul, rms_norm)
    ]


@hookimpl
def policy(platform):
    return PolicyDefaults(Path(__file__).with_name("right.yaml")) if platform == "cpu" else None
