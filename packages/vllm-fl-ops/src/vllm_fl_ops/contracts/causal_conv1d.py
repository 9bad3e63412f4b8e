"""The short convolution over whole sequences, in prefill of linear attention and Mamba."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.arguments import Problem, integers, like, tensor, word
from vllm_fl.contracts.outputs import Exact, Within
from vllm_fl.contracts.sampling import Source
from vllm_fl.contracts.spec import ModelSizes, Sample, Tolerance

from .common import beyond, contract
from .sequences import OF_SEQUENCES, boundaries, ends, fitting_features, sample, slots, state_slots

if TYPE_CHECKING:
    import torch


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    activation: str | None = "silu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """out[t] = act(bias + sum of weight[:, i] * x[t - width + 1 + i] for i from 0 to width - 1).

    Each feature is convolved separately. The inputs before the first token of a sequence are its
    state, or 0 without a state. The call replaces the state by the last width - 1 inputs of the
    sequence, newest last. If the sequence is shorter than that, the new state includes inputs of
    the previous state.

    Args:
        x: (tokens, dim), float32, float16 or bfloat16, of any layout. The sequences follow each
            other. A NaN affects only the same feature of the same sequence.
        weight: (dim, width), of x's dtype, width from 2 to 5.
        bias: (dim,), of x's dtype, or None for 0.
        conv_states: (slots, dim, state_len), of x's dtype, of any layout, state_len at least
            width - 1. The first width - 1 columns are the state; further columns, for speculative
            decoding, are unchanged.
        query_start_loc: (sequences + 1,), int32 or int64: the first token of each sequence, then
            the number of tokens. The state of an empty sequence is unchanged.
        cache_indices: (sequences,), int32 or int64, from 1, distinct: the slots of the sequences.
            Slot 0 is vLLM's null block, and is not used by a sequence.
        has_initial_state: (sequences,), bool. If it is False, the contents of the state are not
            read, and may be NaN.
        activation: "silu", or None for no activation.

    Returns:
        (out, conv_states). `out` has x's shape and dtype, and is contiguous. conv_states is like
        the argument, with the states of the sequences written. The inputs are not modified, with
        one exception: an implementation that consumes conv_states writes into it and returns the
        same tensor.

    Raises:
        CallError: an argument violates this contract. The values of query_start_loc and
            cache_indices are not checked before the call. On an accelerator, incorrect values cause
            a device error or undefined results.

    Source: Gu and Dao, "Mamba" (arXiv:2312.00752), its depthwise convolution; states: vLLM's
    `causal_conv1d_fn`.
    """
    import torch

    width = weight.shape[1]
    before = conv_states.double().clone()
    out = torch.zeros_like(x, dtype=torch.float64, memory_format=torch.contiguous_format)
    for number, (begin, end) in enumerate(pairwise(query_start_loc.tolist())):
        if begin == end:
            continue
        state = before[int(cache_indices[number])][:, : width - 1]
        first = state if bool(has_initial_state[number]) else torch.zeros_like(state)
        inputs = torch.cat((first, x[begin:end].double().T), dim=1)
        for token in range(end - begin):
            out[begin + token] = (inputs[:, token : token + width] * weight.double()).sum(1)
        state.copy_(inputs[:, 1 - width :].clone())
    if bias is not None:
        out = out + bias.double()
    return out * out.sigmoid() if activation == "silu" else out, before


def _by_torch(*call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Call PyTorch's convolution for each padded sequence."""
    import torch
    import torch.nn.functional as F

    x, weight, bias, conv_states, *rest = call
    query_start_loc, cache_indices, has_initial_state, activation = rest
    width, after, outs = weight.shape[1], conv_states.double().clone(), [x.double()[:0]]
    wide = None if bias is None else bias.double()
    kept = conv_states.double() * 1.0
    for number, (begin, end) in enumerate(pairwise(query_start_loc.tolist())):
        slot, tokens = int(cache_indices[number]), x[begin:end].double()
        past = kept[slot, :, : width - 1].T if has_initial_state[number] else tokens.new_zeros(0)
        past = past if len(past) else tokens.new_zeros(width - 1, x.shape[1])
        padded = torch.cat((past, tokens))
        if end > begin:
            kernel = weight.double().unsqueeze(1)
            outs.append(F.conv1d(padded.T[None], kernel, wide, groups=x.shape[1])[0].T)
            after[slot, :, : width - 1] = padded[-(width - 1) :].T
    out = torch.cat(outs)
    return F.silu(out) if activation else out, after


def _call(
    source: Source, ends: tuple[int, ...], dim: int = 64, width: int = 4, more: int = 0
) -> dict[str, Any]:
    """A call for sequences with these ends.

    Every other sequence, beginning with the first, has a state.

    The states have `more` further columns.
    """
    import torch

    device, count = source.device, len(ends)
    return {
        "x": source.normal(ends[-1], dim),
        "weight": source.normal(dim, width, scale=0.5),
        "bias": source.normal(dim),
        "conv_states": source.normal(count + 3, dim, width - 1 + more),
        "query_start_loc": torch.tensor((0, *ends), dtype=torch.int32, device=device),
        "cache_indices": state_slots(count, device),
        "has_initial_state": torch.arange(count, device=device) % 2 == 0,
        "activation": "silu",
    }


def _samples(source: Source) -> Iterator[Sample]:
    for tokens in (16, 1, 0):
        yield sample(f"{tokens} token{'s' * (tokens != 1)}", _call(source, (tokens,)))
    yield sample("two sequences, one without a state", _call(source, (67, 70)))
    yield sample("shorter than the states", _call(source, (2, 3, 5, 6)))
    yield sample("an empty sequence between", _call(source, (5, 5, 9)))
    plain = _call(source, (4, 9))
    yield sample("no bias, no activation", plain, bias=None, activation=None)
    yield sample("2 taps, odd sizes", _call(source, (3, 8), dim=7, width=2))
    yield sample("states with room for more", _call(source, (3, 8), dim=32, width=3, more=2))
    views = _call(source, (3, 6), dim=32)
    views["x"] = source.normal(6, 48)[:, 8:40]
    indices = {name: views[name].long() for name in ("query_start_loc", "cache_indices")}
    yield sample("a strided x, int64 indices", views, **indices)
    stale = _call(source, (5, 7, 12), dim=32)
    stale["conv_states"][:2] = float("nan")  # the null block, and an unused slot
    stale["conv_states"][3] = float("nan")  # of the sequence without a state
    yield sample("NaN in states that are not read", stale)
    broken = _call(source, (5, 9), dim=32)
    broken["x"][2, 7] = float("nan")
    yield sample("NaN in a sequence", broken)


def served_features(made: Callable[..., dict[str, Any]]) -> Callable[..., Iterator[Sample]]:
    """Return the `served` argument of `contract` for a convolution.

    `made`: (source, tokens, dim, width) -> arguments by parameter.
    """

    def served(
        source: Source, sizes: ModelSizes, conv_features: int, conv_taps: int
    ) -> Iterator[Sample]:
        for tokens in sizes.tokens:
            dim, smaller = fitting_features(tokens, conv_features)
            call = made(source, tokens, dim, conv_taps)
            if source.large:
                call["x"] = source.spiked(tokens, dim, scale=4.0, peak=1e3)
            if not sizes.more.get("conv_bias"):
                call["bias"] = None
            name = f"{tokens} x {dim}, {conv_taps} taps{', large' * source.large}"
            yield Sample(name, (*call.values(),), 1e3 if source.large else 1.0, smaller)

    return served


CONV_TOLERANCES = {
    "float32": Tolerance(1.3e-6, 1e-5, "PyTorch's fp32 default; atol for terms that cancel"),
    "float16": Tolerance(
        2e-3, 2e-3, "4 roundings of 2^-11; atol for products of magnitude 1 that are rounded"
    ),
    "bfloat16": Tolerance(
        1.6e-2, 1.6e-2, "4 roundings of 2^-8; atol for products of magnitude 1 that are rounded"
    ),
}
"""Tolerances of the outputs. States are copies of inputs, and must be exact."""

WEIGHT = tensor("dim, width", "x", where="2 <= width <= 5")
BIAS = tensor("dim", "x").optional()
CONV_STATES = tensor("slots, dim, state_len", "x", where="state_len >= width - 1")
"""Arguments of a short convolution with x of (tokens, dim)."""


def _also(
    x: Any, weight: Any, bias: Any, states: Any, begins: Any, indices: Any, *_: Any
) -> Problem:
    problem = boundaries("query_start_loc", begins, len(x))
    return problem or slots("cache_indices", indices, len(states), padding=False)


def _bad(good: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from beyond(good, "cache_indices", len(good["conv_states"]))
    at = good["query_start_loc"]
    if at.device.type == "cpu":  # bad offsets make an accelerator unusable
        yield "query_start_loc beyond the tokens", {"query_start_loc": at * 2}
        yield (
            "query_start_loc before the last token",
            {"query_start_loc": at.clamp(max=len(good["x"]) - 1)},
        )


SPEC = contract(
    causal_conv1d,
    {
        "x": tensor("tokens, dim"),
        "weight": WEIGHT,
        "bias": BIAS,
        "conv_states": CONV_STATES,
        "has_initial_state": tensor("sequences", "bool"),
        "query_start_loc": integers("sequences + 1"),
        "cache_indices": integers("sequences"),
        "activation": word("silu").optional(),
    },
    (like("x"), like("conv_states")),
    also=_also,
    overwrites=("", "conv_states"),
    bad=_bad,
    samples=_samples,
    served=served_features(
        lambda source, tokens, *of: _call(source, ends(tokens, source.large), *of)
    ),
    second_form=_by_torch,
    **OF_SEQUENCES,
    outputs=(Within(), Exact()),
    tolerances=CONV_TOLERANCES,
)
