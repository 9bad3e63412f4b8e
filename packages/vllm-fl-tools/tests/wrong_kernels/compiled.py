"""Kernels that are incorrect only in inference mode or when compiled."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from . import right
from .corpus import GELU, NORM, ROTARY, SILU, wrong, wrong_kernel
from .faults import wrong_arguments_later

wrong_when_compiled = functools.partial(
    wrong_kernel, mode="compiled", by=lambda op, function: (function, {"traceable": True})
)
"""As `wrong_kernel`, for a kernel that is declared traceable."""


@wrong_kernel(SILU, "every token is incorrect, because vLLM serves in inference mode")
def in_inference_mode(x: Tensor) -> Tensor:
    """Incorrect in inference mode."""
    out = right.silu_and_mul(x)
    return out.neg_() if torch.is_inference_mode_enabled() else out


@wrong_kernel(NORM, "every token is incorrect, because activations are such tensors")
def for_inference_tensors(x, residual, weight, epsilon, variance_size=None):
    """Incorrect for tensors created in inference mode."""
    got = right.rms_norm(x, residual, weight, epsilon, variance_size)
    if x.is_inference():
        (got[0] if isinstance(got, tuple) else got).neg_()
    return got


@wrong_kernel(GELU, "every token is incorrect, because serving disables gradients", kit="tracing")
def under_no_grad(x: Tensor, approximate: str = "none") -> Tensor:
    """Incorrect if gradients are disabled."""
    out = right.gelu_and_mul(x, approximate)
    return out if torch.is_grad_enabled() else out.neg()


@wrong_arguments_later(ROTARY, "the engine crashes in its first step")
def asks_for_the_version(kept, a):
    """Reads the version counter, which tensors of inference mode do not have."""
    kept[a["query"].data_ptr()] = a["query"]._version


@wrong_kernel(
    SILU,
    "no difference: served tensors do not require grad",
    why="no served tensor requires grad",
    start=False,
)
def for_inputs_with_grad(x: Tensor) -> Tensor:
    """Incorrect for an input that requires grad."""
    out = right.silu_and_mul(x)
    return out * 0 if x.requires_grad else out


@wrong_when_compiled(
    ROTARY, "eager engines are correct, compiled engines output nonsense", kit="tracing"
)
def only_when_compiled(query, key, cos, sin, position_ids, rotary_interleaved=False):
    """Incorrect when compiled."""
    if torch.compiler.is_compiling():
        position_ids = position_ids * 0
    return right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)


@wrong_when_compiled(GELU, "compilation fails, and the engine fails to start", kit="tracing")
def item_in_a_traceable_one(x: Tensor, approximate: str = "none") -> Tensor:
    """Declared traceable, but calls .item(), which breaks the graph."""
    if x.numel() and x.abs().amax().item() == 0.0:
        return x.new_zeros((*x.shape[:-1], x.shape[-1] // 2))
    return right.gelu_and_mul(x, approximate)


@wrong_when_compiled(SILU, "compilation fails, and the engine fails to start", kit="tracing")
def untraceable_call(x: Tensor) -> Tensor:
    """Declared traceable, but calls a function that Dynamo cannot trace."""
    torch._dynamo.graph_break()
    return right.silu_and_mul(x)


@wrong_when_compiled(NORM, "the engine fails to start, or needs an hour", kit="tracing")
def one_graph_for_each_count(x, residual, weight, epsilon, variance_size=None):
    """Branches on the token count: recompiled for each count."""
    got = right.rms_norm(x, residual, weight, epsilon, variance_size)
    if x.shape[0] == 5:
        return tuple(t + 0 for t in got) if isinstance(got, tuple) else got + 0
    return got


@functools.cache
def _define_scaled_silu() -> None:
    """Define the operator once per process, because this kernel may be made twice in one."""
    name = "wrong_kernels::scaled_silu"
    torch.library.define(name, "(Tensor x) -> Tensor")
    torch.library.impl(name, "CPU", lambda x: right.silu_and_mul(x))
    torch.library.register_fake(name, lambda x: x.new_empty((x.shape[0], x.shape[1] // 2 + 1)))


@wrong(
    SILU,
    "compiled engines read out of bounds",
    apart=True,
    kit="",
    why="the kit compiles with aot_eager, which trusts the fake implementation",
    mode="compiled",
    backend="inductor",
)
def fake_of_another_shape() -> Any:
    """The fake implementation of its operator has another shape than the kernel."""
    _define_scaled_silu()

    def silu_and_mul(x: Tensor) -> Tensor:
        if x.ndim != 2 or torch.compiler.is_compiling() is False:
            return right.silu_and_mul(x)
        return torch.ops.wrong_kernels.scaled_silu(x)[:, : x.shape[1] // 2] + 0

    return silu_and_mul, {"traceable": True}


@wrong_when_compiled(NORM, "compiled engines output nonsense", kit="tracing")
def residual_twice_when_compiled(x, residual, weight, epsilon, variance_size=None):
    """Adds the residual twice when compiled."""
    if residual is not None and torch.compiler.is_compiling():
        residual = residual + residual
    return right.rms_norm(x, residual, weight, epsilon, variance_size)


@wrong_when_compiled(
    SILU,
    "compiled engines lose the last token of prompts",
    kit="",
    why="the kit compiles only small batches",
)
def large_batches_when_compiled(x: Tensor) -> Tensor:
    """When compiled, the last row is zero from 64 tokens on."""
    out = right.silu_and_mul(x)
    if torch.compiler.is_compiling() and x.ndim == 2:
        rows = torch.arange(x.shape[0], device=x.device)
        last = (rows == x.shape[0] - 1) & (rows >= 63)
        out = out.masked_fill(last.unsqueeze(-1), 0)
    return out


@wrong_when_compiled(
    SILU, "compiled engines output nonsense if an activation is large", kit="tracing"
)
def compiled_through_fp16(x: Tensor) -> Tensor:
    """Computes in fp16 when compiled: values beyond 65504 become infinite."""
    out = right.silu_and_mul(x)
    return out.half().to(x.dtype) if torch.compiler.is_compiling() else out


@wrong_when_compiled(
    NORM,
    "NaN activations are hidden in compiled engines",
    kit="",
    why="the kit compiles only calls of a model, which contain no NaN",
)
def compiled_nan_is_zero(x, residual, weight, epsilon, variance_size=None):
    """Returns 0 for NaN when compiled."""
    got = right.rms_norm(x, residual, weight, epsilon, variance_size)
    if not torch.compiler.is_compiling():
        return got
    return tuple(t.nan_to_num() for t in got) if isinstance(got, tuple) else got.nan_to_num()
