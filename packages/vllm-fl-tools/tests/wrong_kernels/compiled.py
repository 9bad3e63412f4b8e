"""Wrong under inference mode or a compiler only."""

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
    "wrong in inference mode",
    "vLLM serves in inference mode: every token is wrong",
)
def in_inference_mode(x: Tensor) -> Tensor:
    out = right.silu_and_mul(x)
    return out.neg_() if torch.is_inference_mode_enabled() else out


@wrong_kernel(
    NORM,
    "wrong for tensors made in inference mode",
    "activations are; every token is wrong",
)
def for_inference_tensors(x, residual, weight, epsilon, variance_size=None):
    got = right.rms_norm(x, residual, weight, epsilon, variance_size)
    if x.is_inference():
        (got[0] if isinstance(got, tuple) else got).neg_()
    return got


@wrong_kernel(
    GELU,
    "wrong where gradients are off",
    "serving has them off: every token is wrong",
    kit="tracing",
)
def under_no_grad(x: Tensor, approximate: str = "none") -> Tensor:
    out = right.gelu_and_mul(x, approximate)
    return out if torch.is_grad_enabled() else out.neg()


@wrong(
    ROTARY,
    "keeps its tables by their version counter, which tensors of inference mode do not have",
    "the engine dies in its first step",
)
def asks_for_the_version() -> Any:
    kept: dict[Any, Any] = {}

    def rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved=False):
        kept[query.data_ptr()] = query._version
        return right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)

    return rotary_embedding


@wrong_kernel(
    SILU,
    "wrong for an input that requires grad",
    "nothing: nothing that is served does",
    why="nothing that is served requires grad",
    start=False,
)
def for_inputs_with_grad(x: Tensor) -> Tensor:
    out = right.silu_and_mul(x)
    return out * 0 if x.requires_grad else out


@wrong(
    ROTARY,
    "wrong when it is compiled",
    "eager engines are right, compiled ones answer nonsense",
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
    "traceable, and calls .item(), which breaks the graph",
    "compilation ends the start",
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
    "traceable, and calls a function that Dynamo cannot trace",
    "compilation ends the start",
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
    "traceable, and branches on the token count: each count is compiled anew",
    "the start ends, or takes an hour",
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
    """Once in a process: two kernels of this kind are made where one is judged beside another."""
    name = "wrong_kernels::scaled_silu"
    torch.library.define(name, "(Tensor x) -> Tensor")
    torch.library.impl(name, "CPU", lambda x: right.silu_and_mul(x))
    torch.library.register_fake(name, lambda x: x.new_empty((x.shape[0], x.shape[1] // 2 + 1)))


@wrong(
    SILU,
    "traceable, with an operator whose fake has another shape than its kernel",
    "compiled engines read memory that is not theirs",
    mode="compiled",
    apart=True,
    kit="",
    why="the kit compiles with aot_eager, which believes the fake",
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
    "traceable; compiled, the residual is added twice when it is given",
    "compiled engines answer nonsense",
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
    "traceable; compiled and from 64 tokens on, the last row is zero",
    "compiled engines garble the last token of prompts",
    kit="",
    mode="compiled",
    why="the kit compiles small batches",
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
    "compiled, it goes through fp16: what is beyond 65504 is infinite",
    "compiled engines answer nonsense where an activation is large",
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
    "compiled, it gives 0 for NaN",
    "a broken activation goes on unseen in compiled engines",
    kit="",
    why="the kit compiles calls of a model, and none of these has NaN",
    mode="compiled",
)
def compiled_nan_is_zero() -> Any:
    def rms_norm(x, residual, weight, epsilon, variance_size=None):
        got = right.rms_norm(x, residual, weight, epsilon, variance_size)
        if not torch.compiler.is_compiling():
            return got
        return tuple(t.nan_to_num() for t in got) if isinstance(got, tuple) else got.nan_to_num()

    return rms_norm, OPEN
