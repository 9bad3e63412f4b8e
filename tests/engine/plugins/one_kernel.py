"""Ops that passes insert into graphs, each as one kernel opaque to the compiler."""

from __future__ import annotations

from torch import Tensor

from vllm_fl import BackendImplKind, OpImpl, hookimpl
from vllm_fl.plugins.registry import known_contracts


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    result: Tensor = known_contracts().contracts["linear"].oracle(x, weight, bias)
    return result.to(x.dtype)


def linear_silu_and_mul(x: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = known_contracts().contracts["linear_silu_and_mul"].oracle(x, weight)
    return result.to(x.dtype)


def linear_gelu_tanh_and_mul(x: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = known_contracts().contracts["linear_gelu_tanh_and_mul"].oracle(x, weight)
    return result.to(x.dtype)


@hookimpl
def register_ops() -> list[OpImpl]:
    kind = BackendImplKind.VENDOR
    return [
        OpImpl(function.__name__, "vendor.one", kind, function, "one")
        for function in (linear, linear_silu_and_mul, linear_gelu_tanh_and_mul)
    ]
