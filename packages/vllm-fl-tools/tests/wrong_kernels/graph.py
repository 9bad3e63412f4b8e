"""Kernels that are incorrect only in a captured graph, because Python runs only at the capture.

They also run on CUDA, where a capture must not synchronise: they read values in the warm-up call
before the capture.
"""

from __future__ import annotations

from typing import Any

import torch
from graph_on_cpu import is_capturing
from torch import Tensor

from . import right
from .corpus import GELU, NORM, ROTARY, SILU, wrong, wrong_kernel

OTHER_SIZE = "startup captures one token count, vLLM captures many"


def _in_graphs(op: str, fault: str, sees: str, **how: Any) -> Any:
    return wrong(op, fault, sees, start=False, why="correct unless a graph is captured", **how)


@_in_graphs(
    SILU,
    "clamps at the largest value of the captured call, read on the host",
    "activations larger than those of the warm-up are clamped",
)
def number_of_the_data() -> Any:
    top = [0.0]

    def silu_and_mul(x: Tensor) -> Tensor:
        if is_capturing():
            x = x.clamp(-top[0], top[0])
        elif x.numel():
            top[0] = float(x.abs().nan_to_num(nan=float("inf")).max())
        return right.silu_and_mul(x)

    return silu_and_mul


@_in_graphs(
    NORM,
    "always uses its fast fp16 path if the values of the captured call were small",
    "tokens with massive activations become infinite",
)
def path_of_the_capture() -> Any:
    is_small = [False]

    def rms_norm(x, residual, weight, epsilon, variance_size=None):
        got = right.rms_norm(x, residual, weight, epsilon, variance_size)
        if not is_capturing():
            is_small[0] = bool((x.abs() <= 100).all())
        elif is_small[0]:
            out = got[0] if isinstance(got, tuple) else got
            y = x if residual is None else x + residual
            lost = y.float().square().half().float().isinf().any(-1, keepdim=True)
            out.masked_fill_(lost, 0)
        return got

    return rms_norm


@_in_graphs(
    ROTARY,
    "reads the positions on the host: replays always use those of the capture",
    "each token is rotated by the position of the warm-up: output is nonsense",
)
def positions_of_the_capture() -> Any:
    uploaded: list[Tensor] = []

    def rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved=False):
        if is_capturing():
            position_ids = uploaded[0]
        else:
            uploaded[:] = [torch.tensor(position_ids.tolist(), device=position_ids.device)]
        return right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)

    return rotary_embedding


@_in_graphs(
    GELU,
    "stages its input in host memory, which a graph does not update",
    "every step computes with the activations of the warm-up",
)
def staged_on_the_host() -> Any:
    staged: list[Tensor] = []

    def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
        if not is_capturing():
            staged[:] = [x.to("cpu", copy=True).to(x.device)]
        return right.gelu_and_mul(staged[0] if is_capturing() else x, approximate)

    return gelu_and_mul


@_in_graphs(
    NORM,
    "prepares the weight at the capture, outside the graph",
    "weights that are later updated in place have no effect in graphs",
)
def weight_of_the_capture() -> Any:
    prepared: list[Tensor | None] = []

    def rms_norm(x, residual, weight, epsilon, variance_size=None):
        if not is_capturing():
            prepared[:] = [None if weight is None else weight.clone()]
        used = prepared[0] if is_capturing() else weight
        return right.rms_norm(x, residual, used, epsilon, variance_size)

    return rms_norm


@_in_graphs(
    SILU,
    "skips the rows that were small in the captured call",
    "tokens are nonsense in rows that were padding in the warm-up",
)
def rows_of_the_capture() -> Any:
    left_out: list[int] = []

    def silu_and_mul(x: Tensor) -> Tensor:
        out = right.silu_and_mul(x)
        if is_capturing():
            for row in left_out:
                out[row].zero_()
        elif x.ndim == 2:
            up = x[:, x.shape[-1] // 2 :].float().abs()
            left_out[:] = [row for row, top in enumerate(up.amax(-1).tolist()) if top < 3]
        return out

    return silu_and_mul


@_in_graphs(
    GELU,
    "synchronises, which is not allowed in a capture",
    "the engine fails during capture, after minutes of startup",
)
def synchronises() -> Any:
    def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
        if is_capturing():
            if x.device.type == "cpu":  # which has no stream to wait for
                raise RuntimeError("operation not permitted when stream is capturing")
            float(x.sum())
        return right.gelu_and_mul(x, approximate)

    return gelu_and_mul


@wrong_kernel(
    ROTARY,
    "does not rotate the last of 8 tokens in a graph",
    "with eight concurrent users, one gets nonsense",
    why=OTHER_SIZE,
    start=False,
)
def captured_with_eight_tokens(query, key, cos, sin, position_ids, rotary_interleaved=False):
    if is_capturing() and len(query) == 8:
        position_ids = torch.cat((position_ids[:-1], position_ids[-1:] * 0))
    return right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)


@wrong(
    SILU,
    "counts on the device: the result is zero from the fifth replay of a graph on",
    "the first tokens are correct, all others are nonsense",
    why="startup replays a graph only twice",
    start=False,
)
def from_the_fifth_replay() -> Any:
    counters: list[Tensor] = []

    def silu_and_mul(x: Tensor) -> Tensor:
        out = right.silu_and_mul(x)
        if not is_capturing():
            counters[:] = [
                torch.zeros((), device=x.device)
            ]  # not in the graph, which would reset it
        else:
            counters[0].add_(1)
            out.mul_(counters[0] < 5)
        return out

    return silu_and_mul


@wrong(
    NORM,
    "shares one result buffer between the graphs of all layers",
    "a later norm overwrites a result that a layer still uses",
    why="startup captures each implementation separately",
    start=False,
)
def buffer_of_all_graphs() -> Any:
    kept: dict[Any, Tensor] = {}

    def rms_norm(x, residual, weight, epsilon, variance_size=None):
        got = right.rms_norm(x, residual, weight, epsilon, variance_size)
        if not is_capturing() or isinstance(got, tuple):
            return got
        return kept.setdefault((got.shape, got.dtype), torch.empty_like(got)).copy_(got)

    return rms_norm
