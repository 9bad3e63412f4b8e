"""Activations to eight bits, on FlagGems's Triton kernels."""

from __future__ import annotations

import torch

from vllm_fl import Availability

from ..loading import flag_gems
from . import implementation

__all__ = ["OPS", "quant_fp8_group"]

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


def _has_fp8(x: torch.Tensor) -> Availability:
    if not x.is_cuda or torch.cuda.get_device_capability(x.device) >= FP8_CAPABILITY:
        return True
    return "this GPU has no float8_e4m3fn in Triton"


OPS = (
    implementation(
        quant_fp8_group, f"max(x.numel(), tokens * x.stride(0)) <= {MOST_ELEMENTS}", _has_fp8
    ),
)
