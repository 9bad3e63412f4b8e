"""RMS normalisation with a gate, on torch_npu's norm kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from . import DIMENSIONS, implementation

__all__ = ["OPS", "rms_norm_gated"]

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

    fp32 is necessary because the product of large features with their gate overflows float16.
    """
    if not x.numel():
        return x.new_empty(x.shape)
    gate = None if z is None else ACTIVATIONS[activation](z.float())
    y = x.float()
    if gate is not None and not norm_before_gate:
        y = y * gate
    size = x.shape[-1] if group_size is None else group_size
    # The kernel applies one weight, so for several groups the weight is applied afterwards.
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


OPS = (implementation(rms_norm_gated, DIMENSIONS),)
