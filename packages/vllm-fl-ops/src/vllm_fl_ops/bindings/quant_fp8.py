"""Binding of `quant_fp8`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.binding import Binding, Bound, LayerTarget, OperatorTarget, Route
from vllm_fl.contracts.routes import Selection

from ..contracts.rules import HIDDEN, INTERMEDIATE
from ._models import is_quantised

if TYPE_CHECKING:
    from torch import Tensor

LAYER = "vllm.model_executor.layers.quantization.input_quant_fp8.QuantFP8"


def _native(
    x: Tensor,
    scale: Tensor | None = None,
    scale_ub: Tensor | None = None,
    per_token: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute with the operations of vLLM's layer, in the same order."""
    import torch

    if scale is not None:
        steps = scale.clone()
    else:
        if per_token:
            largest = x.abs().amax(dim=-1, keepdim=True).to(torch.float32)
        elif x.numel():
            largest = x.abs().max().unsqueeze(-1).to(torch.float32)
        else:
            largest = x.new_zeros(1, dtype=torch.float32)
        if scale_ub is not None:
            largest = largest.clamp(max=scale_ub)
        steps = (largest / 448.0).clamp(min=1.0 / (448.0 * 512.0))
    one = steps if per_token else steps.reshape(())
    value = (x.to(torch.float32) * one.reciprocal()).clamp(-448.0, 448.0)
    return value.to(torch.float8_e4m3fn), steps


def _of_layer(layer: Any, op: Bound) -> Bound:
    """Adapt the op to a QuantFP8 layer. For other layouts of scales, vLLM's code runs."""
    own = _own_forward(layer)

    def forward(
        x: Tensor,
        scale: Tensor | None = None,
        scale_ub: Tensor | None = None,
        use_triton: bool = False,
    ) -> tuple[Tensor, Tensor]:
        shape = layer.group_shape
        plain = (
            x.ndim == 2 and layer.num_token_padding is None and (scale is not None) == layer.static
        )
        if plain and scale is not None and shape.is_per_tensor() and _is_one(scale):
            return op(x, scale, None, False)[0], scale
        if plain and scale is None and (shape.is_per_tensor() or shape.is_per_token()):
            pair: tuple[Tensor, Tensor] = op(x, None, scale_ub, shape.is_per_token())
            return pair
        result: tuple[Tensor, Tensor] = own(x, scale, scale_ub, use_triton)
        return result

    return forward if _has_e4m3fn() else own


def _is_one(scale: Tensor) -> bool:
    import torch

    return scale.numel() == 1 and scale.dtype == torch.float32


def _has_e4m3fn() -> bool:
    """Return whether this platform's fp8 is float8_e4m3fn. On MI300 it is another format."""
    import torch
    from vllm.platforms import current_platform

    return bool(current_platform.fp8_dtype() == torch.float8_e4m3fn)


def _own_forward(layer: Any) -> Bound:
    """vLLM's forward method that this platform uses without the op."""
    from vllm.platforms import current_platform

    name = "forward_native"
    if getattr(layer, "_enforce_enable", False) or type(layer).enabled():
        if current_platform.is_rocm():
            name = "forward_hip"
        elif current_platform.is_xpu():
            name = "forward_xpu"
        elif current_platform.is_cuda():
            name = "forward_cuda"
    cls = next(c for c in type(layer).__mro__ if f"{c.__module__}.{c.__qualname__}" == LAYER)
    own: Bound = getattr(cls, name).__get__(layer)
    return own


def _fits(result: Tensor, input: Tensor) -> bool:
    """Return whether the op computes this call: two dimensions, no rows of padding, and E4M3."""
    import torch

    return input.ndim == 2 and result.shape == input.shape and result.dtype == torch.float8_e4m3fn


def _is_per_token(result: Tensor, input: Tensor, scale: Tensor) -> bool:
    return _fits(result, input) and scale.numel() == len(input)


def _steps(x: Tensor, per_token: bool) -> Tensor:
    import torch

    return x.new_empty((x.shape[0], 1) if per_token else (1,), dtype=torch.float32)


def _static(*further: str) -> OperatorTarget:
    """The target for scales that the caller passes; `further` is the parameter for their layout."""
    return OperatorTarget(
        "_C::static_scaled_fp8_quant",
        ("result", "input", "scale", *further),
        Route(
            args={"x": "input"},
            only=lambda result, input, scale: _fits(result, input) and _is_one(scale),
            out="result",
            results=lambda results: results[0],
            own_args={"group_shape": lambda: None},
            own_results=lambda value, scale: (value, scale),
        ),
        tokens="input",
    )


def _dynamic(name: str, only: Selection, *further: str, per_token: bool) -> OperatorTarget:
    """The target if the operator computes scales; `further` is the parameter for their bound."""
    return OperatorTarget(
        f"_C::{name}",
        ("result", "input", "scale", *further),
        Route(
            args={"x": "input", "scale": lambda: None},
            constants={"per_token": per_token},
            only=only,
            out=("result", "scale"),
            results=lambda results, scale: (results[0], results[1].view(scale.shape)),
            own_args={"scale": _steps},
        ),
        tokens="input",
    )


def _may_have(config: Any) -> bool:
    """Return whether layers, queries for an fp8 cache, or vision encoders may be quantised."""
    return (
        is_quantised(config)
        or str(config.cache_config.cache_dtype).startswith("fp8")
        or config.model_config.multimodal_config is not None
    )


BINDING = Binding(
    targets=(
        # Enabling the layer in vLLM would change what vLLM fuses with norms and activations.
        LayerTarget(LAYER, _native, adapt=_of_layer, enabled=False),
        _static("group_shape"),
        _static(),
        _dynamic("dynamic_scaled_fp8_quant", _fits, per_token=False),
        _dynamic("dynamic_per_token_scaled_fp8_quant", _is_per_token, "scale_ub", per_token=True),
    ),
    sizes=(HIDDEN, INTERMEDIATE),
    not_reached=(
        "given scales for channels, tokens or heads, and padding rows after the tokens",
        "MI300's fp8, a different format",
        "quantisation fused by a vLLM pass (after a norm, an activation, attention or an "
        "all-reduce), in compiled mode on CUDA",
        "quantisation inside another kernel: of keys and values for an fp8 cache, or of experts",
    ),
    when=_may_have,
)
