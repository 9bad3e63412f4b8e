"""Weights of a quantised layer in floating point, from the tensors of its checkpoint format."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Held = Mapping[str, Tensor]
"""Parameter of a layer -> a copy."""

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position of each of eight values in an int32 of AWQ."""


def held_by(layer: torch.nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters and buffers of a layer, without its children.

    They are copied because vLLM and its kernels rewrite tensors in place.
    """
    own = {**layer._parameters, **layer._buffers}
    found = {name: tensor for name, tensor in own.items() if tensor is not None}
    return {name: each.detach().clone() for name, each in found.items() if not each.is_meta}


def dequantised(
    held: Held,
    shape: tuple[int, int],
    widths: list[int],
    block: list[int] | None,
    *,
    from_one: bool = True,
) -> Tensor | None:
    """Return the weights of a layer, (out_features, in_features); None for an unknown format.

    Args:
        held: the layer's tensors.
        shape: (out_features, in_features) on this rank.
        widths: output features of each part of a fused layer.
        block: sizes of the blocks that share a scale, or None.
        from_one: whether the zero points of GPTQ are stored minus 1.
    """
    if "weight_packed" in held and held["weight_packed"].dtype == torch.int32:
        packed = held["weight_packed"]
        if packed.shape[0] != shape[0]:  # experts: vLLM transposes them while it loads
            names = {"weight_packed": "qweight", "weight_scale": "scales"}
            return _of_gptq({names.get(n, n): each for n, each in held.items()}, shape, False)
        values, half = _unpacked(packed, shape[1], 1)
        zeros = held.get("weight_zero_point")
        offset = half if zeros is None else _unpacked(zeros, shape[0], 0)[0]
        return _grouped(values, offset, held["weight_scale"], held.get("weight_g_idx"))
    if "qweight" in held and held["qweight"].dtype == torch.int32:
        return _of_gptq(held, shape, from_one)
    weight = held.get("weight")
    if weight is None or weight.ndim != 2:
        return None
    if tuple(weight.shape) != shape or (shape[0] == shape[1] and weight.stride(0) == 1):
        weight = weight.t()
    if tuple(weight.shape) != shape:
        return None
    if weight.is_floating_point() and weight.itemsize > 1:
        return weight
    scale = held.get("weight_scale", held.get("weight_scale_inv"))
    if scale is None or (weight.dtype != torch.int8 and not weight.is_floating_point()):
        return None
    spread = _spread(scale.float(), shape, widths, block)
    return None if spread is None else weight.float() * spread


def _spread(
    scale: Tensor, shape: tuple[int, int], widths: list[int], block: list[int] | None
) -> Tensor | None:
    """Return the scale of each weight, in a form that broadcasts."""
    if block is not None and scale.ndim == 2:
        for dim, (size, length) in enumerate(zip(block, shape, strict=True)):
            scale = scale.repeat_interleave(size, dim).narrow(dim, 0, length)
        return scale
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.numel() == shape[0]:
        return scale.reshape(-1, 1)
    if scale.numel() == len(widths):
        sizes = torch.tensor(widths, device=scale.device)
        return scale.flatten().repeat_interleave(sizes).reshape(-1, 1)
    return None


def _of_gptq(held: Held, shape: tuple[int, int], from_one: bool) -> Tensor | None:
    """Return weights of GPTQ, which packs input features, or of AWQ, which packs outputs."""
    packed, scales, zeros = held["qweight"], held["scales"].t(), held.get("qzeros")
    offset: Tensor | int
    if packed.shape[0] == shape[1]:
        if zeros is None or packed.shape[1] * 8 != shape[0]:
            return None
        values, offset = (
            _unpacked(each, shape[0], 1)[0].unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1).t()
            for each in (packed, zeros)
        )
        return _grouped(values, offset, scales, None)
    values, offset = _unpacked(packed, shape[1], 0)
    # vLLM's experts of GPTQ have floating-point zero points, and do not use them.
    if zeros is not None and zeros.numel() and not zeros.is_floating_point():
        offset = _unpacked(zeros, shape[0], 1)[0].t() + int(from_one)
    return _grouped(values.t(), offset, scales, held.get("g_idx"))


def _unpacked(packed: Tensor, size: int, dim: int) -> tuple[Tensor, int]:
    """Return (`size` values in this dimension, unpacked from int32 numbers; half their range)."""
    count = size // packed.shape[dim]
    bits = 32 // count
    shifts = torch.arange(count, device=packed.device, dtype=torch.int32) * bits
    values = packed.unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (packed.ndim - dim - 1))
    return (values & (2**bits - 1)).flatten(dim, dim + 1), 2 ** (bits - 1)


def _grouped(values: Tensor, offset: Tensor | int, scales: Tensor, index: Tensor | None) -> Tensor:
    """Return (values - offset) * scales; a group of input features has one offset and one scale.

    Args:
        values: (out_features, in_features), not negative.
        offset: (out_features, groups), or one number for all.
        scales: (out_features, groups).
        index: the group of each input feature; None or empty if groups are consecutive.
    """
    features = values.shape[1]
    if index is None or not index.numel():
        index = torch.arange(features, device=values.device) // (features // scales.shape[1])
    index = index.long()
    offset = offset[:, index] if isinstance(offset, Tensor) else offset
    return (values - offset).float() * scales.float()[:, index]
