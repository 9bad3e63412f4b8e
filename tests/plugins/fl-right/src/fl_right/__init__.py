"""The other vendor with a policy for the same platform; it also has a norm."""

from __future__ import annotations

from pathlib import Path

from vllm_fl import BackendImplKind, OpImpl, PolicyDefaults, hookimpl

VENDOR = BackendImplKind.VENDOR


def silu_and_mul(x):
    from torch.nn.functional import silu

    half = x.shape[-1] // 2
    return silu(x[..., :half]) * x[..., half:]


def rms_norm(x, residual, weight, epsilon, variance_size=None):
    y = x.float() if residual is None else x.float() + residual.float()
    variance = y[..., :variance_size].square().mean(-1, keepdim=True)
    normed = y * (variance + epsilon).rsqrt()
    if weight is not None:
        normed = normed * weight.float()
    normed = normed.to(x.dtype).contiguous()
    return normed if residual is None else (normed, y.to(x.dtype))


@hookimpl
def register_ops():
    return [
        OpImpl(fn.__name__, "vendor.right", VENDOR, fn, "right") for fn in (silu_and_mul, rms_norm)
    ]


@hookimpl
def policy(platform):
    return PolicyDefaults(Path(__file__).with_name("right.yaml")) if platform == "cpu" else None
