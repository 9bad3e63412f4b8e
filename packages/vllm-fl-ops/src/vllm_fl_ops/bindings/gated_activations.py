"""Bindings of gated activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_fl.contracts.binding import Binding, LayerTarget

from ._activation import activation_binding, activation_operator
from ._experts import SHARED_INTERMEDIATE
from ._models import has_experts, is_multimodal, mentions
from ._phrases import EXPERTS

if TYPE_CHECKING:
    from torch import Tensor


def _silu_native(x: Tensor) -> Tensor:
    from vllm.model_executor.layers.activation import SiluAndMul

    result: Tensor = SiluAndMul.forward_native(x)
    return result


def _mul_native(x: Tensor) -> Tensor:
    from torch.nn.functional import silu

    half = x.shape[-1] // 2
    return x[..., :half] * silu(x[..., half:])


def _gelu_native(x: Tensor, approximate: str = "none") -> Tensor:
    from torch.nn.functional import gelu

    half = x.shape[-1] // 2
    return gelu(x[..., :half], approximate=approximate) * x[..., half:]


def _sparse_native(x: Tensor, std_multiplier: float, approximate: str = "none") -> Tensor:
    from torch import mean, std
    from torch.nn.functional import gelu, relu

    half = x.shape[-1] // 2
    gate = x[..., :half]
    cutoff = mean(gate, dim=-1, keepdim=True)
    cutoff = cutoff + std(gate, dim=-1, keepdim=True, unbiased=False) * std_multiplier
    return gelu(relu(gate - cutoff), approximate=approximate) * x[..., half:]


def _fatrelu_native(x: Tensor, threshold: float = 0.0) -> Tensor:
    from torch.nn.functional import threshold as above

    half = x.shape[-1] // 2
    return above(x[..., :half], threshold, 0.0) * x[..., half:]


def _swigluoai_native(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    gate = x[..., ::2].clamp(max=limit)
    up = x[..., 1::2].clamp(min=-limit, max=limit)
    return (up + 1) * (gate * (gate * alpha).sigmoid())


def _clamped_native(x: Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    half = x.shape[-1] // 2
    gate = x[..., :half].clamp(max=limit)
    up = x[..., half:].clamp(min=-limit, max=limit)
    return gate * (alpha * gate).sigmoid() * (up + beta)


BINDING: Mapping[str, Binding] = {
    "silu_and_mul": activation_binding(
        "SiluAndMul",
        _silu_native,
        # Called by mixtures of experts: the parameters of the CUDA build, then of the CPU build.
        activation_operator("_C::silu_and_mul", out="result"),
        activation_operator("_C::silu_and_mul"),
        LayerTarget("vllm.model_executor.hw_agnostic.layers.activation.SiluAndMul", _silu_native),
        sizes=(SHARED_INTERMEDIATE,),
        not_reached=(
            EXPERTS,
            "quantised models: vLLM's passes and kernels fuse activation and quantisation",
        ),
        needs=("vllm.model_executor.layers.activation:SiluAndMul.forward_native",),
    ),
    "mul_and_silu": activation_binding(
        "MulAndSilu",
        _mul_native,
        activation_operator("_C::mul_and_silu"),
        when=is_multimodal,  # Molmo, Ultravox, Cohere's and Aya's vision models
    ),
    "gelu_and_mul": activation_binding(
        "GeluAndMul",
        _gelu_native,
        activation_operator("_C::gelu_and_mul", approximate="none"),
        activation_operator("_C::gelu_tanh_and_mul", approximate="tanh"),
        not_reached=(EXPERTS,),
        when=mentions("gelu", or_multimodal=True),
    ),
    "gelu_and_mul_sparse": activation_binding(
        "GeluAndMulSparse",
        _sparse_native,
        when=mentions("activation_sparsity"),  # Gemma 3n
    ),
    "fatrelu_and_mul": activation_binding(
        "FatreluAndMul",
        _fatrelu_native,
        activation_operator("_C::fatrelu_and_mul", "threshold"),
        when=mentions("fatrelu"),
    ),
    "swigluoai_and_mul": activation_binding(
        "SwigluOAIAndMul",
        _swigluoai_native,
        # Called by gpt-oss's experts unless they are a single kernel, in CUDA builds.
        activation_operator("_C::swigluoai_and_mul", "alpha", "limit"),
        not_reached=(
            EXPERTS,
            "experts with all gates before the up projections (`swigluoai_uninterleave`): another "
            "op",
        ),
        when=has_experts,  # only the experts of gpt-oss and MiniMax's models
    ),
    "silu_and_mul_with_clamp": activation_binding(
        "SiluAndMulWithClamp",
        _clamped_native,
        # Called by experts unless they are a single kernel, in CUDA builds.
        activation_operator("_C::silu_and_mul_with_clamp", "limit", "alpha", "beta", out="result"),
        not_reached=(
            EXPERTS,
            "routed experts under expert parallelism: vLLM's kernel skips what other ranks compute",
        ),
        when=mentions("swiglu"),  # such as `swiglu_limit`
        former_layers=("silu_and_mul_with_clamp",),
    ),
}
