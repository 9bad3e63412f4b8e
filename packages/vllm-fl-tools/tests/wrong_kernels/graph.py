"""Kernels that are incorrect only in a captured graph, because Python runs only at the capture.

They also run on CUDA, where a capture must not synchronise: they read values in the warm-up call
before the capture.
"""

from __future__ import annotations

import functools

import torch
from graph_on_cpu import is_capturing

from . import right
from .corpus import GELU, NORM, ROTARY, SILU, wrong_kernel
from .faults import wrong_result_later

OTHER_SIZE = "startup captures one token count, vLLM captures many"


_in_graphs = functools.partial(
    wrong_result_later, start=False, why="correct unless a graph is captured"
)


@_in_graphs(SILU, "activations larger than those of the warm-up are clamped")
def number_of_the_data(top, out, x):
    """Clamps at the largest value of the captured call, read on the host."""
    if is_capturing():
        return right.silu_and_mul(x.clamp(-top["x"], top["x"]))
    if x.numel():
        top["x"] = float(x.abs().nan_to_num(nan=float("inf")).max())
    return out


@_in_graphs(NORM, "tokens with massive activations become infinite")
def path_of_the_capture(seen, got, x, residual, *rest):
    """Always uses its fast fp16 path if the values of the captured call were small."""
    if not is_capturing():
        seen["small"] = bool((x.abs() <= 100).all())
    elif seen["small"]:
        out = got[0] if isinstance(got, tuple) else got
        y = x if residual is None else x + residual
        lost = y.float().square().half().float().isinf().any(-1, keepdim=True)
        out.masked_fill_(lost, 0)
    return got


@_in_graphs(ROTARY, "each token is rotated by the position of the warm-up: output is nonsense")
def positions_of_the_capture(uploaded, got, query, key, cos, sin, position_ids, *rest):
    """Reads the positions on the host: replays always use those of the capture."""
    if is_capturing():
        return right.rotary_embedding(query, key, cos, sin, uploaded["ids"], *rest)
    uploaded["ids"] = torch.tensor(position_ids.tolist(), device=position_ids.device)
    return got


@_in_graphs(GELU, "every step computes with the activations of the warm-up")
def staged_on_the_host(staged, out, x, *rest):
    """Stages its input in host memory, which a graph does not update."""
    if is_capturing():
        return right.gelu_and_mul(staged["x"], *rest)
    staged["x"] = x.to("cpu", copy=True).to(x.device)
    return out


@_in_graphs(NORM, "weights that are later updated in place have no effect in graphs")
def weight_of_the_capture(prepared, got, x, residual, weight, *rest):
    """Prepares the weight at the capture, outside the graph."""
    if is_capturing():
        return right.rms_norm(x, residual, prepared["weight"], *rest)
    prepared["weight"] = None if weight is None else weight.clone()
    return got


@_in_graphs(SILU, "tokens are nonsense in rows that were padding in the warm-up")
def rows_of_the_capture(left_out, out, x):
    """Skips the rows that were small in the captured call."""
    if is_capturing():
        for row in left_out["rows"]:
            out[row].zero_()
    elif x.ndim == 2:
        up = x[:, x.shape[-1] // 2 :].float().abs()
        left_out["rows"] = [row for row, top in enumerate(up.amax(-1).tolist()) if top < 3]
    return out


@_in_graphs(GELU, "the engine fails during capture, after minutes of startup")
def synchronises(seen, out, x, *rest):
    """Synchronises, which is not allowed in a capture."""
    if is_capturing():
        if x.device.type == "cpu":  # which has no stream to wait for
            raise RuntimeError("operation not permitted when stream is capturing")
        float(x.sum())
    return out


@wrong_kernel(ROTARY, "with eight concurrent users, one gets nonsense", why=OTHER_SIZE, start=False)
def captured_with_eight_tokens(query, key, cos, sin, position_ids, rotary_interleaved=False):
    """Does not rotate the last of 8 tokens in a graph."""
    if is_capturing() and len(query) == 8:
        position_ids = torch.cat((position_ids[:-1], position_ids[-1:] * 0))
    return right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)


@wrong_result_later(
    SILU,
    "the first tokens are correct, all others are nonsense",
    why="startup replays a graph only twice",
    start=False,
)
def from_the_fifth_replay(counters, out, x):
    """Counts on the device: the result is zero from the fifth replay of a graph on."""
    if not is_capturing():  # in the graph, it would be reset
        counters["replays"] = torch.zeros((), device=x.device)
    else:
        counters["replays"].add_(1)
        out.mul_(counters["replays"] < 5)
    return out


@wrong_result_later(
    NORM,
    "a later norm overwrites a result that a layer still uses",
    why="startup captures each implementation separately",
    start=False,
)
def buffer_of_all_graphs(kept, got, *args):
    """Shares one result buffer between the graphs of all layers."""
    if not is_capturing() or isinstance(got, tuple):
        return got
    return kept.setdefault((got.shape, got.dtype), torch.empty_like(got)).copy_(got)
