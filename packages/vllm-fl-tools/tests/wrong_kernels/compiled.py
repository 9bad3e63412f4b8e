"""Kernels that are incorrect only in inference mode or when compiled."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import right
from .corpus import GELU, NORM, ROTARY, SILU, wrong, wrong_kernel

OPEN = {"traceable": True}


@wrong_kernel(
    SILU,
    "incorrect in inference mode",
    "every token is incorrect, because vLLM serves in inference mode",
)
def in_inference_mode(x: Tensor) -> Tensor:
    out = right.silu_and_mul(x)
    return out.neg_() if torch.is_inference_mode_enabled() else out


@wrong_kernel(
    NORM,
    "incorrect for tensors created in inference mode",
    "every token is incorrect, because activations are such tensors",
)
def for_inference_tensors(x, residual, weight, epsilon, variance_size=None):
    got = right.rms_norm(x, residual, weight, epsilon, variance_size)
    if x.is_inference():
        (got[0] if isinstance(got, tuple) else got).neg_()
    return got


@wrong_kernel(
    GELU,
    "incorrect if gradients are disabled",
    "every token is incorrect, because serving disables gradients",
    kit="tracing",
)
def under_no_grad(x: Tensor, approximate: str = "none") -> Tensor:
    out = right.gelu_and_mul(x, approximate)
    return out if torch.is_grad_enabled() else out.neg()


@wrong(
    ROTARY,
    "reads the version counter, which tensors of inference mode do not have",
    "the engine crashes in its first step",
)
def asks_for_the_version() -> Any:
    kept: dict[Any, Any] = {}

    def rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved=False):
        kept[query.data_ptr()] = query._version
        return right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)

    return rotary_embedding


@wrong_kernel(
    SILU,
    "incorrect for an input that requires grad",
    "no difference: served tensors do not require grad",
    why="no served tensor requires grad",
    start=False,
)
def for_inputs_with_grad(x: Tensor) -> Tensor:
    out = right.silu_and_mul(x)
    return out * 0 if x.requires_grad else out


@wrong(
    ROTARY,
    "incorrect when compiled",
    "eager engines are correct, compiled engines output nonsense",
    kit="tracing",
    mode="compiled",
)
def only_when_compiled() -> Any:
    def rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved=False):
        if torch.compiler.is_compiling():
            position_ids = position_ids * 0
        return right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)

    return rotary_embedding, OPEN


@wrong(
    GELU,
    "declared traceable, but calls .item(), which breaks the graph",
    "compilation fails, and the engine fails to start",
    kit="tracing",
    mode="compiled",
)
def item_in_a_traceable_one() -> Any:
    def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
        if x.numel() and x.abs().amax().item() == 0.0:
            return x.new_zeros((*x.shape[:-1], x.shape[-1] // 2))
        return right.gelu_and_mul(x, approximate)

    return gelu_and_mul, OPEN


@wrong(
    SILU,
    "declared traceable, but calls a function that Dynamo cannot trace",
    "compilation fails, and the engine fails to start",
    kit="tracing",
    mode="compiled",
)
def untraceable_call() -> Any:
    def silu_and_mul(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return right.silu_and_mul(x)

    return silu_and_mul, OPEN


@wrong(
    NORM,
    "branches on the token count: recompiled for each count",
    "the engine fails to start, or needs an hour",
    kit="tracing",
    mode="compiled",
)
def one_graph_for_each_count() -> Any:
    def rms_norm(x, residual, weight, epsilon, variance_size=None):
        got = right.rms_norm(x, residual, weight, epsilon, variance_size)
        if x.shape[0] == 5:
            return tuple(t + 0 for t in got) if isinstance(got, tuple) else got + 0
        return got

    return rms_norm, OPEN


@cache
def _define_scaled_silu() -> None:
    """Define the operator once per process, because this kernel may be made twice in one."""
    name = "wrong_kernels::scaled_silu"
    torch.library.define(name, "(Tensor x) -> Tensor")
    torch.library.impl(name, "CPU", lambda x: right.silu_and_mul(x))
    torch.library.register_fake(name, lambda x: x.new_empty((x.shape[0], x.shape[1] // 2 + 1)))


@wrong(
    SILU,
    "the fake implementation of its operator has another shape than the kernel",
    "compiled engines read out of bounds",
    mode="compiled",
    apart=True,
    kit="",
    why="the kit compiles with aot_eager, which trusts the fake implementation",
    backend="inductor",
)
def fake_of_another_shape() -> Any:
    _define_scaled_silu()

    def silu_and_mul(x: Tensor) -> Tensor:
        if x.ndim != 2 or torch.compiler.is_compiling() is False:
            return right.silu_and_mul(x)
        return torch.ops.wrong_kernels.scaled_silu(x)[:, : x.shape[1] // 2] + 0

    return silu_and_mul, OPEN


@wrong(
    NORM,
    "adds the residual twice when compiled",
    "compiled engines output nonsense",
    kit="tracing",
    mode="compiled",
)
def residual_twice_when_compiled() -> Any:
    def rms_norm(x, residual, weight, epsilon, variance_size=None):
        if residual is not None and torch.compiler.is_compiling():
            residual = residual + residual
        return right.rms_norm(x, residual, weight, epsilon, variance_size)

    return rms_norm, OPEN


@wrong(
    SILU,
    "when compiled, the last row is zero from 64 tokens on",
    "compiled engines lose the last token of prompts",
    kit="",
    mode="compiled",
    why="the kit compiles only small batches",
)
def large_batches_when_compiled() -> Any:
    def silu_and_mul(x: Tensor) -> Tensor:
        out = right.silu_and_mul(x)
        if torch.compiler.is_compiling() and x.ndim == 2:
            rows = torch.arange(x.shape[0], device=x.device)
            last = (rows == x.shape[0] - 1) & (rows >= 63)
            out = out.masked_fill(last.unsqueeze(-1), 0)
        return out

    return silu_and_mul, OPEN


@wrong(
    SILU,
    "computes in fp16 when compiled: values beyond 65504 become infinite",
    "compiled engines output nonsense if an activation is large",
    kit="tracing",
    mode="compiled",
)
def compiled_through_fp16() -> Any:
    def silu_and_mul(x: Tensor) -> Tensor:
        out = right.silu_and_mul(x)
        return out.half().to(x.dtype) if torch.compiler.is_compiling() else out

    return silu_and_mul, OPEN


@wrong(
    NORM,
    "returns 0 for NaN when compiled",
    "NaN activations are hidden in compiled engines",
    kit="",
    why="the kit compiles only calls of a model, which contain no NaN",
    mode="compiled",
)
def compiled_nan_is_zero() -> Any:
    def rms_norm(x, residual, weight, epsilon, variance_size=None):
        got = right.rms_norm(x, residual, weight, epsilon, variance_size)
        if not torch.compiler.is_compiling():
            return got
        return tuple(t.nan_to_num() for t in got) if isinstance(got, tuple) else got.nan_to_num()

    return rms_norm, OPEN
