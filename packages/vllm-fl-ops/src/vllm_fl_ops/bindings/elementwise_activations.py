"""Bindings of elementwise activations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_fl.contracts.binding import Binding

from ._activation import activation_binding, activation_operator
from ._models import mentions
from ._phrases import EXPERTS, GELU_TANH

if TYPE_CHECKING:
    from torch import Tensor


def _new_native(x: Tensor) -> Tensor:
    from torch import pow, tanh

    c = math.sqrt(2.0 / math.pi)
    return 0.5 * x * (1.0 + tanh(c * (x + 0.044715 * pow(x, 3.0))))


def _fast_native(x: Tensor) -> Tensor:
    from torch import tanh

    return 0.5 * x * (1.0 + tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def _quick_native(x: Tensor) -> Tensor:
    return x * (1.702 * x).sigmoid()


def _relu2_native(x: Tensor) -> Tensor:
    return x.relu().square()


def _xielu_native(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    from torch import expm1, min, where
    from torch.nn.functional import softplus

    positive, negative = softplus(alpha_p), beta + softplus(alpha_n)
    return where(
        x > 0,
        positive * x * x + beta * x,
        (expm1(min(x, eps)) - x) * negative + beta * x,
    )


BINDING: Mapping[str, Binding] = {
    "gelu_new": activation_binding(
        "NewGELU",
        _new_native,
        activation_operator("_C::gelu_new"),
        not_reached=(GELU_TANH,),
        when=mentions("gelu_new", or_multimodal=True),
    ),
    "gelu_fast": activation_binding(
        "FastGELU",
        _fast_native,
        activation_operator("_C::gelu_fast"),
        not_reached=(GELU_TANH,),
        when=mentions("gelu_fast", or_multimodal=True),
    ),
    "quick_gelu": activation_binding(
        "QuickGELU",
        _quick_native,
        activation_operator("_C::gelu_quick"),
        when=mentions("quick_gelu", or_multimodal=True),
    ),
    "relu2": activation_binding(
        "ReLUSquaredActivation",
        _relu2_native,
        activation_operator("_C::relu_squared"),
        not_reached=(
            EXPERTS,
            "experts without a gate: vLLM computes their activation by two PyTorch operators",
            "quantised models: a vLLM kernel fuses activation and quantisation",
        ),
        when=mentions("relu2", or_multimodal=True),
    ),
    "xielu": activation_binding("XIELU", _xielu_native, when=mentions("xielu")),
}
