"""Activations to eight bits, on FlagGems's Triton kernels."""

from __future__ import annotations

import math

import torch

from vllm_fl import Availability, OpImpl

from ..loading import available, flag_gems, unsuitable
from . import DEFAULT

__all__ = ["OPS", "quant_fp8_group", "supports_quant_fp8_group"]

FP8_CAPABILITY = (8, 9)
"""Of the first NVIDIA GPUs for which Triton compiles float8_e4m3fn."""

MOST_ELEMENTS = 2**31 - 1
"""The kernel counts them in 32 bits, gaps between rows included."""


def quant_fp8_group(
    x: torch.Tensor, group_size: int = 128, eps: float = 1e-10, ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest float8_e4m3fn to x / scale of its group, computed in fp32.

    Args:
        x: (tokens, hidden), float32, float16 or bfloat16, of any layout.
        group_size: features of a group; divides hidden.
        eps: the least of what counts as a group's largest |x|; above 0.
        ue8m0: scales are powers of two, 2^-33 at least.

    Returns:
        (value, scale).

    Raises:
        NotImplementedError: FlagGems does not load.
    """
    if not x.numel():
        steps = x.new_empty((x.shape[0], x.shape[1] // group_size), dtype=torch.float32)
        return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), steps
    x = x if x.stride(1) == 1 else x.contiguous()
    # Left to itself it takes float32 for fp8 on GPUs before Hopper. Triton's interpreter takes no
    # bool for the flag.
    pair: tuple[torch.Tensor, torch.Tensor] = flag_gems().per_token_group_quant_fp8(
        x, group_size, eps, dtype=torch.float8_e4m3fn, scale_ue8m0=int(ue8m0)
    )
    return pair


def supports_quant_fp8_group(
    x: torch.Tensor, group_size: int = 128, eps: float = 1e-10, ue8m0: bool = False
) -> Availability:
    """True, or why the kernel would fail, or read beyond x."""
    if x.ndim != 2 or not x.shape[1] or group_size < 1 or x.shape[1] % group_size:
        return f"x, {tuple(x.shape)}, is not (tokens, hidden) of whole groups of {group_size}"
    if not 0 < eps < math.inf or not isinstance(ue8m0, bool):
        return f"eps={eps} is not finite and above 0, or ue8m0={ue8m0} no bool"
    if max(x.numel(), x.shape[0] * x.stride(0)) > MOST_ELEMENTS:
        return "x has more elements than the kernel counts"
    reason = unsuitable("x", x)
    if reason is None and x.is_cuda and torch.cuda.get_device_capability(x.device) < FP8_CAPABILITY:
        return "this GPU has no float8_e4m3fn in Triton"
    return reason or True


OPS = (
    OpImpl(
        "quant_fp8_group",
        *DEFAULT,
        quant_fp8_group,
        available=available,
        supports=supports_quant_fp8_group,
    ),
)
