"""Wrong in a captured graph only: Python runs at the capture, and never again.

They run on CUDA, too, where no capture may wait for the device: what a graph of theirs holds was
read from the call before, with which a capture is warmed up.
"""

from __future__ import annotations

from typing import Any

import torch
from graph_on_cpu import is_capturing
from torch import Tensor

from . import right
from .corpus import GELU, NORM, ROTARY, SILU, wrong, wrong_kernel

OTHER_SIZE = "one token count is captured at start, vLLM captures many"


def _in_graphs(op: str, fault: str, sees: str, **how: Any) -> Any:
    return wrong(op, fault, sees, start=False, why="right wherever no graph is captured", **how)


@_in_graphs(
    SILU,
    "clamps at the largest value of the call that was captured, which it reads on the host",
    "activations larger than those of the warm-up are cut",
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
    "takes its fast path, through fp16, for ever if the captured call's values were small",
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
    "reads the positions on the host: those of the capture are replayed for ever",
    "each token is turned as if it were at the warm-up's position: word salad",
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
    "stages its input in memory of the host, to which a graph copies nothing",
    "every step answers with the activations of the warm-up",
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
    "prepares the weight while it is captured, and not in the graph",
    "weights that are loaded later, in place, have no effect where graphs serve",
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
    "leaves out the rows that were small when the call was captured",
    "the padding of the warm-up decides which tokens answer nonsense",
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
    "synchronises, which nothing that is captured may",
    "the engine dies while it captures, after minutes of its start",
)
def synchronises() -> Any:
    def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
        if is_capturing():
            if x.device.type == "cpu":  # which has nothing to wait for
                raise RuntimeError("operation not permitted when stream is capturing")
            float(x.sum())
        return right.gelu_and_mul(x, approximate)

    return gelu_and_mul


@wrong_kernel(
    ROTARY,
    "captured with 8 tokens, the last of them does not turn",
    "eight users at a time: one of them gets nonsense",
    why=OTHER_SIZE,
    start=False,
)
def captured_with_eight_tokens(query, key, cos, sin, position_ids, rotary_interleaved=False):
    if is_capturing() and len(query) == 8:
        position_ids = torch.cat((position_ids[:-1], position_ids[-1:] * 0))
    return right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)


@wrong(
    SILU,
    "counts on the device: from the fifth replay of a graph on its result is zero",
    "the first tokens are right, all others are nonsense",
    why="start replays a graph twice",
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
    "graphs of all layers share one buffer for their results",
    "what a layer kept of an earlier norm changes under it",
    why="start captures each implementation alone",
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
