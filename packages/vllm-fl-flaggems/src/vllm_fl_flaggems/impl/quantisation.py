"""Quantisation of activations to 8 bits, on FlagGems's Triton kernels."""

from __future__ import annotations

import torch

from vllm_fl import Availability

from ..loading import flag_gems
from . import implementation

FP8_CAPABILITY = (8, 9)
"""Lowest compute capability with float8_e4m3fn in Triton."""

MOST_ELEMENTS = 2**31 - 1
"""The kernel uses 32-bit indices, which include gaps between rows."""


def quant_fp8_group(
    x: torch.Tensor, group_size: int = 128, eps: float = 1e-10, ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round x / scale of its group to float8_e4m3fn, computed in fp32.

    Scales that are powers of two (ue8m0) are at least 2^-33.
    """
    if not x.numel():
        steps = x.new_empty((x.shape[0], x.shape[1] // group_size), dtype=torch.float32)
        return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), steps
    x = x if x.stride(1) == 1 else x.contiguous()
    # By default FlagGems uses float32 instead of fp8 on GPUs before Hopper. Triton's interpreter
    # does not accept a bool for the flag.
    pair: tuple[torch.Tensor, torch.Tensor] = flag_gems().per_token_group_quant_fp8(
        x, group_size, eps, dtype=torch.float8_e4m3fn, scale_ue8m0=int(ue8m0)
    )
    return pair


def _has_fp8(x: torch.Tensor) -> Availability:
    if not x.is_cuda or torch.cuda.get_device_capability(x.device) >= FP8_CAPABILITY:
        return True
    return "Triton does not support float8_e4m3fn on this GPU"


OPS = (
    implementation(
        quant_fp8_group, f"max(x.numel(), tokens * x.stride(0)) <= {MOST_ELEMENTS}", _has_fp8
    ),
)
