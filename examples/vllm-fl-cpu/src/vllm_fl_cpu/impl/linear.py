"""Classes for quantised linear layers that compute the product with PyTorch.

vLLM imports this module when such a class is chosen (`linear_kernels` in `plugin.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.kernels.linear import (
    Int8ScaledMMLinearKernel,
    MPLinearKernel,
)
from vllm.model_executor.layers.quantization.utils import replace_parameter
from vllm.model_executor.layers.quantization.utils.w8a8_utils import convert_to_channelwise

__all__ = ["Int8Linear", "WNA16Linear"]

LOW, HIGH = -128, 127
"""The numbers of int8."""

Verdict = tuple[bool, str | None]


def _put(layer: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    replace_parameter(layer, name, torch.nn.Parameter(value, requires_grad=False))


class Int8Linear(Int8ScaledMMLinearKernel):  # type: ignore[misc]
    """Product of int8 weights and int8 activations, accumulated in int32."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Verdict:
        from vllm.platforms import current_platform

        return (True, None) if current_platform.is_cpu() else (False, "it is for CPUs")

    @classmethod
    def can_implement(cls, c: Any) -> Verdict:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Keep one scale per output feature, and one for static activations. The sums of the
        weights correct the result for the zero point of the activations."""
        weight, scale, input_scale, zero, sums = self.layer_param_names
        scales = getattr(layer, scale)
        if not self.config.is_channelwise:
            scales = convert_to_channelwise(scales, layer.logical_widths)
        _put(layer, weight, getattr(layer, weight).data)
        _put(layer, scale, scales.data.float().flatten())
        total = getattr(layer, weight).sum(dim=1, dtype=torch.int32)
        setattr(layer, sums, torch.nn.Parameter(total, requires_grad=False))
        if not self.config.is_static_input_scheme:
            return
        steps = getattr(layer, input_scale).data.float()
        if self.config.input_symmetric:
            _put(layer, input_scale, steps.max())
            return
        # The parts of a fused layer may have different ranges. One range includes all.
        zeros = getattr(layer, zero).data.float()
        least, most = (steps * (LOW - zeros)).min(), (steps * (HIGH - zeros)).max()
        step = (most - least) / (HIGH - LOW)
        _put(layer, input_scale, step)
        _put(layer, zero, (LOW - least / step).round())

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight, scales, step, zero, sums = self._get_layer_params(layer)
        rows = x.reshape(-1, x.shape[-1]).float()
        if step is None:
            step, zero = self._quantisation(rows)
        values = rows / step if zero is None else rows / step + zero
        rounded = values.round().clamp(LOW, HIGH).to(torch.int8)
        total: torch.Tensor = torch._int_mm(rounded, weight.t()).float()
        total = total if zero is None else total - zero * sums
        exact: torch.Tensor = total * step * scales
        result = exact if bias is None else exact + bias
        return result.to(x.dtype).reshape(*x.shape[:-1], len(sums))

    def _quantisation(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a step and a zero point for each row. The range includes 0, because a row of equal
        numbers would otherwise have no range."""
        if self.config.input_symmetric:
            most = rows.abs().amax(1, keepdim=True)
            return (most / HIGH).clamp(min=1e-12), None
        least = rows.amin(1, keepdim=True).clamp(max=0)
        step = (rows.amax(1, keepdim=True).clamp(min=0) - least).clamp(min=1e-12) / (HIGH - LOW)
        return step, (LOW - least / step).round()


class WNA16Linear(MPLinearKernel):  # type: ignore[misc]
    """Product with weights that are dequantised once, when they are loaded. It takes the memory of
    the weights before quantisation."""

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: Any) -> Verdict:
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return False, "it is for CPUs"
        if c.weight_type.size_bits not in (4, 8) or c.weight_type.is_floating_point():
            return False, f"no code for weights of {c.weight_type}"
        if getattr(c, "has_g_idx", False):
            return False, "no code for groups in the order of activations"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Replace the packed weights by (out_features, in_features) in the layer's dtype."""
        packed, scales, zeros = self._get_weight_params(layer)
        by_feature = packed.data.t() if packed.input_dim == 1 else packed.data
        values = self._unpacked(by_feature, 0)
        steps = scales.data.t() if scales.output_dim == 0 else scales.data
        offset: torch.Tensor | int = self.config.weight_type.bias
        size = values.shape[0] // steps.shape[0]
        if self.config.zero_points and zeros is not None:
            of_groups = zeros.data.t() if zeros.output_dim == 0 else zeros.data
            offset = self._unpacked(of_groups, 1).repeat_interleave(size, 0)
        dense = (values - offset).float() * steps.float().repeat_interleave(size, 0)
        _put(layer, self.w_q_name, dense.t().to(self.config.act_type).contiguous())

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return torch.nn.functional.linear(x, getattr(layer, self.w_q_name), bias)

    def _unpacked(self, packed: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the numbers in int32s, the first in the lowest bits, along this dimension."""
        bits: int = self.config.weight_type.size_bits
        shifts = torch.arange(0, 32, bits, dtype=torch.int32)
        shape = (-1, *[1] * (packed.ndim - dim - 1))
        found: torch.Tensor = packed.unsqueeze(dim + 1) >> shifts.view(shape)
        return torch.bitwise_and(found, 2**bits - 1).flatten(dim, dim + 1)
