"""One of two vendors with a policy for one platform; it prefers its own kernel."""

from __future__ import annotations

from pathlib import Path

from vllm_fl import BackendImplKind, OpImpl, PolicyDefaults, hookimpl


def silu_and_mul(x):
    return x


@hookimpl
def register_ops():
    return [OpImpl("silu_and_mul", "vendor.left", BackendImplKind.VENDOR, silu_and_mul, "left")]


@hookimpl
def policy(platform):
    return PolicyDefaults(Path(__file__).with_name("left.yaml")) if platform == "cpu" else None
