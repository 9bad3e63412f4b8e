"""Activations, on torch_npu's kernels."""

from __future__ import annotations

import torch

from . import DIMENSIONS, implementation

__all__ = [
    "OPS",
    "gelu_and_mul",
    "quick_gelu",
    "silu_and_mul",
    "silu_and_mul_with_clamp",
    "swigluoai_and_mul",
]

GELU = {"none": 0, "tanh": 1}
"""Numbers of the approximations in `npu_geglu`."""


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(x[..., :d]) * x[..., d:], by `npu_swiglu`."""
    if not x.numel():
        return _nothing(x)
    out: torch.Tensor = torch.ops.npu.npu_swiglu.default(x, dim=-1)
    return out.contiguous()


def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu(x[..., :d]) * x[..., d:], by `npu_geglu`, which also returns the gelu.

    `npu_gelu_mul` would return only the product, but supports at most 1024 features. An unknown
    `approximate`, the caller's error by contract, raises KeyError.
    """
    form = GELU[approximate]
    if not x.numel():
        return _nothing(x)
    out: torch.Tensor
    out, _gelu = torch.ops.npu.npu_geglu.default(x, dim=-1, approximate=form, activate_left=True)
    return out.contiguous()


def swigluoai_and_mul(x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate) of clamped pairs, by `npu_clipped_swiglu`."""
    return _clipped(x, alpha=alpha, limit=limit, bias=1.0, interleaved=True)


def silu_and_mul_with_clamp(
    x: torch.Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0
) -> torch.Tensor:
    """gate * sigmoid(alpha * gate) * (up + beta) of clamped halves, by `npu_clipped_swiglu`."""
    return _clipped(x, alpha=alpha, limit=limit, bias=beta, interleaved=False)


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(1.702 * x), by `npu_fast_gelu`."""
    if not x.numel():
        return x.new_empty(x.shape)
    out: torch.Tensor = torch.ops.npu.npu_fast_gelu.default(x)
    return out.contiguous()


def _clipped(
    x: torch.Tensor, *, alpha: float, limit: float, bias: float, interleaved: bool
) -> torch.Tensor:
    """Call `npu_clipped_swiglu`, which requires two or more dimensions and contiguous tensors."""
    if not x.numel():
        return _nothing(x)
    rows = x[None] if x.ndim == 1 else x
    out: torch.Tensor = torch.ops.npu.npu_clipped_swiglu.default(
        rows.contiguous(), dim=-1, alpha=alpha, limit=limit, bias=bias, interleaved=interleaved
    )
    return out.view((*x.shape[:-1], -1))


def _nothing(x: torch.Tensor) -> torch.Tensor:
    """Return an empty result; whether the kernels support empty tensors is not documented."""
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


OPS = (
    implementation(silu_and_mul, DIMENSIONS),
    implementation(gelu_and_mul, DIMENSIONS),
    implementation(swigluoai_and_mul, DIMENSIONS),
    implementation(silu_and_mul_with_clamp, DIMENSIONS),
    implementation(quick_gelu, DIMENSIONS),
)
