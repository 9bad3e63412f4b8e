"""Quantisation of activations to int8, on CANN's kernels through torch_npu."""

from __future__ import annotations

import torch

from . import implementation

__all__ = ["OPS", "quant_int8"]


def quant_int8(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    azp: torch.Tensor | None = None,
    asymmetric: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round x / scale to int8 with a scale per token, by `npu_dynamic_quant`.

    Not supported: float32, a given scale, zero points.
    """
    if not x.numel():
        steps = x.new_empty((x.shape[0], 1), dtype=torch.float32)
        return x.new_empty(x.shape, dtype=torch.int8), steps
    value, steps = torch.ops.npu.npu_dynamic_quant.default(x)
    return value.contiguous(), steps.unsqueeze(-1)


# `npu_quantize` accepts a given scale, but its documentation does not define the combinations of
# shapes and dtypes or the rounding; zero points of `npu_dynamic_quant_asymmetric` are fractions.
OPS = (
    implementation(quant_int8, "x.dtype != torch.float32", "scale is None and asymmetric is None"),
)
