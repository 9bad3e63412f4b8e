"""Activations to int8, on CANN's kernels through torch_npu."""

from __future__ import annotations

import torch

from vllm_fl import Availability, OpImpl

from ..npu import available
from . import VENDOR, unsuitable

__all__ = ["OPS", "quant_int8", "supports_quant_int8"]


def quant_int8(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    azp: torch.Tensor | None = None,
    asymmetric: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest int8 to x / scale, a scale for each token, by `npu_dynamic_quant`.

    Args:
        x: (tokens, hidden), float16 or bfloat16, of any layout.
        scale, azp, asymmetric: None.

    Returns:
        (value, scale).

    Raises:
        RuntimeError: CANN's kernel fails.
    """
    if not x.numel():
        steps = x.new_empty((x.shape[0], 1), dtype=torch.float32)
        return x.new_empty(x.shape, dtype=torch.int8), steps
    value, steps = torch.ops.npu.npu_dynamic_quant.default(x)
    return value.contiguous(), steps.unsqueeze(-1)


def supports_quant_int8(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    azp: torch.Tensor | None = None,
    asymmetric: bool | None = None,
) -> Availability:
    """True, or why the kernel would fail, or quantise otherwise.

    `npu_quantize` takes a given scale, but its documentation does not say which shapes and dtypes
    may be mixed, nor how it rounds; zero points of `npu_dynamic_quant_asymmetric` are fractions.
    """
    if x.dtype == torch.float32:
        return "the kernel takes float16 and bfloat16, and x is torch.float32"
    if x.ndim != 2 or not x.shape[1]:
        return f"x is {tuple(x.shape)}, not (tokens, hidden) with a feature"
    if scale is not None or azp is not None:
        return "a given scale: only each token's own"
    if asymmetric is not None:
        return "asymmetric: the kernel's zero points are no whole numbers"
    return unsuitable("x", x) or True


OPS = (
    OpImpl(
        "quant_int8",
        *VENDOR,
        quant_int8,
        "ascend",
        available=available,
        supports=supports_quant_int8,
    ),
)
