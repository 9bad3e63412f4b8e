"""Binding of `linear_fp8`: products of fp8 layers, in the graphs that vLLM compiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.binding import Binding, GraphTarget, new_node

from .linear import BINDING as LINEAR

if TYPE_CHECKING:
    from torch import Tensor

W8A8 = ("fp8", "fbgemm_fp8", "ptpc_fp8", "fp8_per_tensor", "fp8_per_channel", "online")
"""vLLM's names of quantisation methods that make all linear layers fp8. The last three quantise
while loading.
"""


def _native(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    out_dtype: str,
    bias: Tensor | None = None,
) -> Tensor:
    import torch
    from vllm._custom_ops import cutlass_scaled_mm

    dtype = getattr(torch, out_dtype)
    result: Tensor = cutlass_scaled_mm(x, weight.t(), x_scale, weight_scale, dtype, bias)
    return result


def _find(node: Any) -> tuple[Any, ...] | None:
    """The op's arguments if a node is an fp8 product without block scales, else None."""
    import torch

    given = node.kwargs
    x, turned, result = (given[name] for name in ("a", "b", "out"))
    scales = given["a_scales"], given["b_scales"]
    is_fp8 = all(of.meta["val"].dtype == torch.float8_e4m3fn for of in (x, turned))
    if not is_fp8 or any(len(sizes := _sizes(of)) > 1 and sizes[1] != 1 for of in scales):
        return None  # the operator also computes int8
    weight = new_node(node.graph, torch.ops.aten.permute.default, turned, [1, 0])
    dtype = str(result.meta["val"].dtype).removeprefix("torch.")
    return x, weight, *map(_scale, scales), dtype, given.get("bias")


def _sizes(scale: Any) -> list[Any]:
    """The sizes of a scale; 0 for a size that is unknown before the call."""
    return [size if isinstance(size, int) else 0 for size in scale.meta["val"].shape]


def _scale(scale: Any) -> Any:
    import torch

    match _sizes(scale):
        case [1, 1]:
            return new_node(scale.graph, torch.ops.aten.reshape.default, scale, [1])
        case [size] if size != 1:
            return new_node(scale.graph, torch.ops.aten.unsqueeze.default, scale, 1)
    return scale


def _may_have(config: Any) -> bool:
    """Return whether linear layers may have fp8 weights and activations, without block scales."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return False
    quantization = getattr(config.model_config.hf_config, "quantization_config", None) or {}
    match config.model_config.quantization:
        case name if name in W8A8:
            return not quantization.get("weight_block_size")
        case "modelopt":
            algorithm = (quantization.get("quantization") or quantization)["quant_algo"]
            return str(algorithm).upper() in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
        case "compressed-tensors":
            return any(map(_is_w8a8, quantization["config_groups"].values()))
    return False


def _is_w8a8(group: Any) -> bool:
    """Return whether a compressed-tensors group of layers has fp8 weights and activations."""
    weights, activations = group["weights"], group.get("input_activations") or {}
    is_fp8 = all(
        (part.get("type"), part.get("num_bits")) == ("float", 8) for part in (weights, activations)
    )
    return is_fp8 and weights.get("strategy") in ("tensor", "channel")


BINDING = Binding(
    targets=(GraphTarget(("_C.cutlass_scaled_mm.default",), _find, _native),),
    sizes=LINEAR.sizes,
    not_reached=(
        "eager mode, and platforms without vLLM's CUDA operators",
        "scales of blocks of features, as in DeepSeek's checkpoints",
        "devices on which vLLM does not choose CUTLASS: below 8.9, where only weights are fp8, "
        "and from 10.0 on",
        "products that a vLLM pass joined with a collective (`fuse_gemm_comms`), and experts",
    ),
    when=_may_have,
    products=True,
)
