"""Where vLLM runs `quant_fp8`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.binding import Binding, Bound, LayerPlace, OperatorPlace, put
from vllm_fl.contracts.sizes import HIDDEN, INTERMEDIATE

from ._models import is_quantised

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]

LAYER = "vllm.model_executor.layers.quantization.input_quant_fp8.QuantFP8"


def _native(
    x: Tensor,
    scale: Tensor | None = None,
    scale_ub: Tensor | None = None,
    per_token: bool = False,
) -> tuple[Tensor, Tensor]:
    """As the layer's own, in its order of operations."""
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
    """A QuantFP8, which has other layouts of scales, too: these stay vLLM's."""
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
    """Whether this platform's fp8 is float8_e4m3fn: MI300's is another format."""
    import torch
    from vllm.platforms import current_platform

    return bool(current_platform.fp8_dtype() == torch.float8_e4m3fn)


def _own_forward(layer: Any) -> Bound:
    """The forward of vLLM's class that this platform would have taken of it."""
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


def _fits(result: Tensor, x: Tensor) -> bool:
    """Whether an operator's call is the op: two dimensions, no rows of padding, and E4M3."""
    import torch

    return x.ndim == 2 and result.shape == x.shape and result.dtype == torch.float8_e4m3fn


def _to_static(op: Bound) -> Bound:
    def kernel(result: Tensor, input: Tensor, scale: Tensor, group_shape: Any = None) -> Any:
        if not _fits(result, input) or not _is_one(scale):
            return NotImplemented
        return put(result, op(input, scale, None, False)[0])

    return kernel


def _to_dynamic(op: Bound) -> Bound:
    def kernel(result: Tensor, input: Tensor, scale: Tensor) -> Any:
        if not _fits(result, input):
            return NotImplemented
        value, steps = op(input, None, None, False)
        return put((result, scale), (value, steps.view(scale.shape)))

    return kernel


def _to_per_token(op: Bound) -> Bound:
    def kernel(result: Tensor, input: Tensor, scale: Tensor, scale_ub: Tensor | None) -> Any:
        if not _fits(result, input) or scale.numel() != len(input):
            return NotImplemented
        value, steps = op(input, None, scale_ub, True)
        return put((result, scale), (value, steps.view(scale.shape)))

    return kernel


def _from_operator(count: int) -> Callable[[Bound], Bound]:
    """For an operator of so many parameters: the fourth is the bound, or a given scale's layout."""

    def native(replaced: Bound) -> Bound:
        def quant_fp8(
            x: Tensor,
            scale: Tensor | None = None,
            scale_ub: Tensor | None = None,
            per_token: bool = False,
        ) -> tuple[Tensor, Tensor]:
            import torch

            result = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
            if scale is None:
                shape = (x.shape[0], 1) if per_token else (1,)
                scale = x.new_empty(shape, dtype=torch.float32)
            replaced(*(result, x, scale, scale_ub)[:count])
            return result, scale

        return quant_fp8

    return native


def _may_have(config: Any) -> bool:
    """Attention quantises its queries for an fp8 cache, and vision encoders may theirs."""
    return (
        is_quantised(config)
        or str(config.cache_config.cache_dtype).startswith("fp8")
        or config.model_config.multimodal_config is not None
    )


_STATIC = ("result", "input", "scale")

BINDING = Binding(
    places=(
        # Whether vLLM is told that it is on decides what vLLM fuses with norms and activations.
        LayerPlace(LAYER, _native, adapt=_of_layer, enabled=False),
        *(
            OperatorPlace(
                "_C::static_scaled_fp8_quant",
                names,
                _to_static,
                _from_operator(len(names)),
                tokens="input",
            )
            for names in ((*_STATIC, "group_shape"), _STATIC)
        ),
        OperatorPlace(
            "_C::dynamic_scaled_fp8_quant", _STATIC, _to_dynamic, _from_operator(3), tokens="input"
        ),
        OperatorPlace(
            "_C::dynamic_per_token_scaled_fp8_quant",
            (*_STATIC, "scale_ub"),
            _to_per_token,
            _from_operator(4),
            tokens="input",
        ),
    ),
    sizes=(HIDDEN, INTERMEDIATE),
    not_reached=(
        "given scales for channels, tokens or heads, and rows of padding behind the tokens",
        "MI300's fp8, which is another format",
        "quantisation that a fusion pass of vLLM matched (after a norm, an activation, attention "
        "or an all-reduce), in compiled mode on CUDA",
        "quantisation inside another kernel: of keys and values on their way to an fp8 cache, or "
        "of experts",
    ),
    when=_may_have,
)
