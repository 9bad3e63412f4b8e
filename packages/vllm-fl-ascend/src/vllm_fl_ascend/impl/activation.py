"""Activations, on torch_npu's kernels."""

from __future__ import annotations

import math

import torch

from vllm_fl import Availability, OpImpl

from ..npu import available
from . import VENDOR, unsuitable

__all__ = [
    "OPS",
    "gelu_and_mul",
    "quick_gelu",
    "silu_and_mul",
    "silu_and_mul_with_clamp",
    "supports_gelu_and_mul",
    "supports_quick_gelu",
    "supports_silu_and_mul",
    "supports_silu_and_mul_with_clamp",
    "supports_swigluoai_and_mul",
    "swigluoai_and_mul",
]

GELU = {"none": 0, "tanh": 1}
"""How `npu_geglu` numbers the two forms."""


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(x[..., :d]) * x[..., d:], by `npu_swiglu`.

    Args:
        x: (..., 2 * d) of 1 to 8 dimensions, float32, float16 or bfloat16, of any layout.

    Returns:
        (..., d), of x's dtype.

    Raises:
        RuntimeError: CANN's kernel fails.
    """
    if not x.numel():
        return _nothing(x)
    out: torch.Tensor = torch.ops.npu.npu_swiglu.default(x, dim=-1)
    return out.contiguous()


def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu(x[..., :d]) * x[..., d:], by `npu_geglu`, which also returns the gelu.

    `npu_gelu_mul` would return no more than the product, but takes at most 1024 features.

    Args:
        x: (..., 2 * d) of 1 to 8 dimensions, float32, float16 or bfloat16, of any layout.
        approximate: "none" (erf) or "tanh".

    Returns:
        (..., d), of x's dtype.

    Raises:
        KeyError: `approximate` is another word, which the contract calls the caller's mistake.
        RuntimeError: CANN's kernel fails.
    """
    form = GELU[approximate]
    if not x.numel():
        return _nothing(x)
    out: torch.Tensor
    out, _gelu = torch.ops.npu.npu_geglu.default(x, dim=-1, approximate=form, activate_left=True)
    return out.contiguous()


def supports_silu_and_mul(x: torch.Tensor) -> Availability:
    """True, or why the kernel would fail."""
    reason = unsuitable("x", x) or _no_halves(x)
    if reason:
        return reason
    return True


def supports_gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> Availability:
    """True, or why the kernel would fail."""
    return supports_silu_and_mul(x)


def swigluoai_and_mul(x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate) of clamped pairs, by `npu_clipped_swiglu`.

    Args:
        x: (..., 2 * d) of 1 to 8 dimensions, float32, float16 or bfloat16, of any layout: gate and
            up projection take turns.
        alpha: a finite number.
        limit: a finite number above 0.

    Returns:
        (..., d), of x's dtype.

    Raises:
        RuntimeError: CANN's kernel fails.
    """
    return _clipped(x, alpha=alpha, limit=limit, bias=1.0, interleaved=True)


def supports_swigluoai_and_mul(
    x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0
) -> Availability:
    """True, or why the kernel would fail, or compute with a number that means nothing."""
    if not math.isfinite(alpha) or not 0 < limit < math.inf:
        return f"alpha={alpha} is not finite, or limit={limit} not finite and above 0"
    return supports_silu_and_mul(x)


def silu_and_mul_with_clamp(
    x: torch.Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0
) -> torch.Tensor:
    """gate * sigmoid(alpha * gate) * (up + beta) of clamped halves, by `npu_clipped_swiglu`.

    Args:
        x: (..., 2 * d) of 1 to 8 dimensions, float32, float16 or bfloat16, of any layout: gate,
            then up projection.
        limit: a finite number above 0.
        alpha: a finite number.
        beta: a finite number.

    Returns:
        (..., d), of x's dtype.

    Raises:
        RuntimeError: CANN's kernel fails.
    """
    return _clipped(x, alpha=alpha, limit=limit, bias=beta, interleaved=False)


def supports_silu_and_mul_with_clamp(
    x: torch.Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0
) -> Availability:
    """True, or why the kernel would fail, or compute with a number that means nothing."""
    if not 0 < limit < math.inf or not math.isfinite(alpha) or not math.isfinite(beta):
        return f"limit={limit} is not finite and above 0, or alpha={alpha} or beta={beta} infinite"
    return supports_silu_and_mul(x)


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(1.702 * x), by `npu_fast_gelu`.

    Args:
        x: of 1 to 8 dimensions, float32, float16 or bfloat16, of any layout.

    Returns:
        x's shape and dtype.

    Raises:
        RuntimeError: CANN's kernel fails.
    """
    if not x.numel():
        return x.new_empty(x.shape)
    out: torch.Tensor = torch.ops.npu.npu_fast_gelu.default(x)
    return out.contiguous()


def supports_quick_gelu(x: torch.Tensor) -> Availability:
    """True, or why the kernel would fail."""
    return unsuitable("x", x) or True


def _clipped(
    x: torch.Tensor, *, alpha: float, limit: float, bias: float, interleaved: bool
) -> torch.Tensor:
    """`npu_clipped_swiglu`, which takes two dimensions or more, contiguous: other tensors are
    viewed or copied so."""
    if not x.numel():
        return _nothing(x)
    rows = x[None] if x.ndim == 1 else x
    out: torch.Tensor = torch.ops.npu.npu_clipped_swiglu.default(
        rows.contiguous(), dim=-1, alpha=alpha, limit=limit, bias=bias, interleaved=interleaved
    )
    return out.view((*x.shape[:-1], -1))


def _no_halves(x: torch.Tensor) -> str | None:
    if x.shape[-1] % 2:
        return f"the last dimension of x, {tuple(x.shape)[-1:]}, has no two halves"
    return None


def _nothing(x: torch.Tensor) -> torch.Tensor:
    """The result without elements: that the kernels take empty tensors is documented nowhere."""
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


OPS = (
    OpImpl(
        "silu_and_mul",
        *VENDOR,
        silu_and_mul,
        "ascend",
        available=available,
        supports=supports_silu_and_mul,
    ),
    OpImpl(
        "gelu_and_mul",
        *VENDOR,
        gelu_and_mul,
        "ascend",
        available=available,
        supports=supports_gelu_and_mul,
    ),
    OpImpl(
        "swigluoai_and_mul",
        *VENDOR,
        swigluoai_and_mul,
        "ascend",
        available=available,
        supports=supports_swigluoai_and_mul,
    ),
    OpImpl(
        "silu_and_mul_with_clamp",
        *VENDOR,
        silu_and_mul_with_clamp,
        "ascend",
        available=available,
        supports=supports_silu_and_mul_with_clamp,
    ),
    OpImpl(
        "quick_gelu",
        *VENDOR,
        quick_gelu,
        "ascend",
        available=available,
        supports=supports_quick_gelu,
    ),
)
