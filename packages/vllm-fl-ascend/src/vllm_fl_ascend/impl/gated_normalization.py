"""RMS normalisation with a gate, on torch_npu's kernel of the norm."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from vllm_fl import Availability, OpImpl

from ..npu import available
from . import VENDOR, elsewhere, mixed, unsuitable

__all__ = ["OPS", "rms_norm_gated", "supports_rms_norm_gated"]

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "sigmoid": torch.sigmoid,
}


def rms_norm_gated(
    x: torch.Tensor,
    z: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    activation: str = "swish",
) -> torch.Tensor:
    """norm(x) * act(z), or norm(x * act(z)), by `npu_rms_norm` in fp32, rounded once.

    In fp32 since the product of large features with their gate is beyond float16's range.

    Args:
        x: (..., hidden) of 1 to 8 dimensions, float32, float16 or bfloat16, of any layout.
        z: of x's shape and dtype, or None.
        weight: (hidden,), of x's dtype or float32.
        epsilon: added to the mean of squares, above 0.
        group_size: how many features have a mean in common, a divisor of hidden; None for all.
        norm_before_gate: whether x alone is normed, or its product with the gate.
        activation: `silu`, `swish` or `sigmoid`.

    Returns:
        (..., hidden), contiguous, of x's dtype.

    Raises:
        RuntimeError: CANN's kernel fails.
    """
    if not x.numel():
        return x.new_empty(x.shape)
    gate = None if z is None else ACTIVATIONS[activation](z.float())
    y = x.float()
    if gate is not None and not norm_before_gate:
        y = y * gate
    size = x.shape[-1] if group_size is None else group_size
    # One group takes its weight in the kernel. Several have one each, and the kernel knows one.
    alone = size == x.shape[-1]
    scale = weight.float() if alone else y.new_ones(size)
    normed: torch.Tensor
    normed, _rstd = torch.ops.npu.npu_rms_norm.default(y.reshape(-1, size), scale, epsilon=epsilon)
    normed = normed.contiguous().view(x.shape)
    if not alone:
        normed = normed * weight
    if gate is not None and norm_before_gate:
        normed = normed * gate
    return normed.to(x.dtype).contiguous()


def supports_rms_norm_gated(
    x: torch.Tensor,
    z: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    activation: str = "swish",
) -> Availability:
    """True, or why the kernel would fail, or compute with an argument that means nothing."""
    reason = unsuitable("x", x) or mixed("z", z, "x", x)
    if reason:
        return reason
    if z is not None and z.shape != x.shape:
        return f"z is {tuple(z.shape)} and x {tuple(x.shape)}"
    if weight.dtype not in (x.dtype, torch.float32):
        return f"weight is {weight.dtype}, neither {x.dtype} nor torch.float32"
    if reason := elsewhere("weight", weight, x):
        return reason
    if weight.shape != x.shape[-1:]:
        return f"weight is {tuple(weight.shape)} and the last dimension of x {tuple(x.shape)[-1:]}"
    if epsilon <= 0:
        return f"epsilon is not above 0: {epsilon}"
    if group_size is not None and (group_size < 1 or x.shape[-1] % group_size):
        return f"groups of {group_size} do not divide {x.shape[-1]} features"
    if activation not in ACTIVATIONS or norm_before_gate not in (True, False):
        return f"no gate of {activation!r} with norm_before_gate={norm_before_gate!r}"
    return True


OPS = (
    OpImpl(
        "rms_norm_gated",
        *VENDOR,
        rms_norm_gated,
        "ascend",
        available=available,
        supports=supports_rms_norm_gated,
    ),
)
