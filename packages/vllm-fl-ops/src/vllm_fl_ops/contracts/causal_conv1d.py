"""The short convolution over whole sequences: before linear attention and Mamba, in prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.checks import Problem, floating_tensor, on_device_of, shaped
from vllm_fl.contracts.outputs import Exact, Within
from vllm_fl.contracts.sampling import Source
from vllm_fl.contracts.spec import BadInput, ModelSizes, OpSpec, Sample, Tolerance, Variant

from .sequences import boundaries, ends, fitting_features, slots, state_slots

if TYPE_CHECKING:
    import torch

__all__ = ["SPEC", "TOLERANCES", "check_activation", "check_convolution", "served_features"]


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

    Each feature by itself. What lies before the first token of a sequence is in its state, or 0
    where it has none. Afterwards the state holds the last width - 1 inputs of the sequence, the
    newest last, those of the state before among them where the sequence is shorter.

    Args:
        x: (tokens, dim), float32, float16 or bfloat16, of any layout: one sequence after the other.
            A NaN spoils its own feature of its own sequence alone.
        weight: (dim, width), of x's dtype, width from 2 to 5.
        bias: (dim,), of x's dtype, or None for 0.
        conv_states: (slots, dim, state_len), of x's dtype, of any layout, state_len at least
            width - 1. The first width - 1 columns are the state; further ones are for speculative
            decoding, and stay as they are.
        query_start_loc: (sequences + 1,), int32 or int64: where each sequence begins, and where the
            last one ends. The state of an empty sequence stays as it is.
        cache_indices: (sequences,), int32 or int64, from 1: which slot has the state of each
            sequence, none of them twice. Slot 0 is vLLM's null block, which no sequence has.
        has_initial_state: (sequences,), bool. What the state of one without holds, NaN among it, is
            not read.
        activation: "silu", or None for none.

    Returns:
        (out, conv_states): out of x's shape and dtype, contiguous; conv_states of its own, with the
        states of the sequences written. The inputs are left as they were, unless the implementation
        was granted to consume conv_states: it returns the same tensor then.

    Raises:
        CallError: an argument is not as said here. The numbers of query_start_loc and cache_indices
            are not looked at before the call: on an accelerator wrong ones are the device's own
            error, or undefined.

    Source: Gu and Dao, "Mamba" (arXiv:2312.00752), its depthwise convolution; the states are those
    of vLLM's `causal_conv1d_fn`.
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


def _by_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    activation: str | None = "silu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's own convolution over a padded sequence."""
    import torch
    import torch.nn.functional as F

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


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    activation: str | None = "silu",
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), conv_states.new_empty(conv_states.shape)


def _check(
    x: Any,
    weight: Any,
    bias: Any,
    conv_states: Any,
    query_start_loc: Any,
    cache_indices: Any,
    has_initial_state: Any,
    activation: Any = "silu",
) -> Problem:
    import torch

    problem = check_convolution(x, weight, bias, "conv_states", conv_states)
    if problem:
        return problem
    name = "has_initial_state"
    if not isinstance(has_initial_state, torch.Tensor) or has_initial_state.dtype != torch.bool:
        return name, "must be a torch.Tensor of bool"
    if has_initial_state.ndim != 1:
        return name, f"must be (sequences,), got {tuple(has_initial_state.shape)}"
    sequences, first = len(has_initial_state), ("x", x)
    problem = boundaries("query_start_loc", query_start_loc, len(x), sequences, first)
    problem = problem or slots(
        "cache_indices", cache_indices, sequences, len(conv_states), first, padding=False
    )
    return (
        problem
        or on_device_of(name, has_initial_state, "x", x)
        or check_activation("activation", activation)
    )


def check_convolution(x: Any, weight: Any, bias: Any, name: str, value: Any) -> Problem:
    """What is wrong with a short convolution's tensors, its states called `name`, or None."""
    problem = floating_tensor("x", x)
    if problem:
        return problem
    if x.ndim != 2:
        return "x", f"must be (tokens, dim), got {tuple(x.shape)}"
    for each, tensor in (("weight", weight), ("bias", bias), (name, value)):
        if each == "bias" and tensor is None:
            continue
        problem = floating_tensor(each, tensor) or on_device_of(each, tensor, "x", x)
        if problem:
            return problem
        if tensor.dtype != x.dtype:
            return each, f"must have x's dtype {x.dtype}, got {tensor.dtype}"
    dim = x.shape[1]
    if weight.ndim != 2 or len(weight) != dim or not 2 <= weight.shape[1] <= 5:
        return "weight", f"must be ({dim}, 2 to 5), got {tuple(weight.shape)}"
    if bias is not None:
        problem = shaped("bias", bias, (dim,), "one number for each feature of x,")
        if problem:
            return problem
    if value.ndim != 3 or value.shape[1] != dim or value.shape[2] < weight.shape[1] - 1:
        wanted = f"(slots, {dim}, {weight.shape[1] - 1} or more)"
        return name, f"must be {wanted}, got {tuple(value.shape)}"
    return None


def check_activation(name: str, value: Any) -> Problem:
    """`value` must name an activation that the convolutions have."""
    return None if value in ("silu", None) else (name, f"must be 'silu' or None, got {value!r}")


def _call(
    source: Source, ends: tuple[int, ...], dim: int = 64, width: int = 4, more: int = 0
) -> dict[str, Any]:
    """A call over sequences that end so, of which every other one has a state before.

    The states have room for `more` columns.
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


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source = Source(dtype, device)

    def sample(name: str, call: dict[str, Any], **change: Any) -> Sample:
        return Sample(name, (*(call | change).values(),))

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
    stale["conv_states"][:2] = float("nan")  # the null block's, and one that nobody has
    stale["conv_states"][3] = float("nan")  # that of the one without a state before
    yield sample("NaN in states that are not read", stale)
    broken = _call(source, (5, 9), dim=32)
    broken["x"][2, 7] = float("nan")
    yield sample("NaN in a sequence", broken)


def _served(
    sizes: ModelSizes, dtype: torch.dtype, device: torch.device, large: bool = False
) -> Iterator[Sample]:
    def made(source: Source, tokens: int, dim: int, width: int) -> dict[str, Any]:
        return _call(source, ends(tokens), dim, width)

    yield from served_features(made, sizes, Source(dtype, device, large), large)


def served_features(
    made: Callable[..., dict[str, Any]], sizes: ModelSizes, source: Source, large: bool
) -> Iterator[Sample]:
    """The calls of a convolution, which `made` makes: (source, tokens, dim, width) -> arguments by
    parameter; none where the model's sizes are not told."""
    told = [sizes.more.get(name) for name in ("conv_features", "conv_taps")]
    if None in told:
        return
    features, width = (int(number or 0) for number in told)
    for tokens in sizes.tokens:
        dim, smaller = fitting_features(tokens, features)
        call = made(source, tokens, dim, width)
        if large:
            call["x"] = source.spiked(tokens, dim, scale=4.0, peak=1e3)
        if not sizes.more.get("conv_bias"):
            call["bias"] = None
        name = f"{tokens} x {dim}, {width} taps{', large' * large}"
        yield Sample(name, (*call.values(),), 1e3 if large else 1.0, smaller)


def _bad_inputs(dtype: torch.dtype, device: torch.device) -> Iterator[BadInput]:
    import torch

    source = Source(dtype, device)
    good = _call(source, (3, 5), dim=64, width=4)  # of which every kernel has one

    def bad(name: str, **change: Any) -> BadInput:
        return BadInput(name, (*(good | change).values(),), next(iter(change)))

    x, weight, bias, cache, at, slot, has, _ = good.values()
    yield bad("x is not a tensor", x=[1.0])
    yield bad("x of integers", x=x.long())
    yield bad("x of three dimensions", x=x[None])
    yield bad("weight of one feature, which would broadcast", weight=weight[:1])
    yield bad("weight of one tap", weight=weight[:, :1])
    other = torch.float32 if dtype != torch.float32 else torch.bfloat16
    yield bad("weight of another dtype", weight=weight.to(other))
    yield bad("bias of one feature, which would broadcast", bias=bias[:1])
    yield bad("states of fewer columns", conv_states=cache[:, :, :2])
    yield bad("states of other features", conv_states=cache[:, :32])
    yield bad("states of another dtype", conv_states=cache.to(other))
    yield bad("query_start_loc of floats", query_start_loc=at.float())
    yield bad("query_start_loc of one sequence", query_start_loc=at[:2])
    yield bad("cache_indices of one sequence", cache_indices=slot[:1])
    yield bad("has_initial_state of integers", has_initial_state=has.int())
    if source.device.type == "cpu":  # an accelerator would be unusable after it
        yield bad("query_start_loc beyond the tokens", query_start_loc=at * 2)
        yield bad("query_start_loc before the last token", query_start_loc=at.clamp(max=len(x) - 1))
        yield bad("cache_indices beyond the slots", cache_indices=slot + len(cache))
        yield bad("cache_indices below the slots", cache_indices=slot - len(cache))
    yield bad("an activation that is not known", activation="gelu")


TOLERANCES = {
    "float32": Tolerance(1.3e-6, 1e-5, "PyTorch's own fp32 default; atol for terms that cancel"),
    "float16": Tolerance(
        2e-3, 2e-3, "4 roundings of 2^-11; atol for products of magnitude 1 that are rounded"
    ),
    "bfloat16": Tolerance(
        1.6e-2, 1.6e-2, "4 roundings of 2^-8; atol for products of magnitude 1 that are rounded"
    ),
}
"""Of the outputs; states are moved, and must be exact."""

SPEC = OpSpec(
    oracle=causal_conv1d,
    variants=(
        Variant(
            "",
            "(Tensor x, Tensor weight, Tensor? bias, Tensor conv_states, Tensor query_start_loc, "
            'Tensor cache_indices, Tensor has_initial_state, str? activation="silu") '
            "-> (Tensor, Tensor)",
            overwrites=("", "conv_states"),
        ),
    ),
    fake=_fake,
    check=_check,
    samples=_samples,
    served=_served,
    by_token=frozenset({"x"}),
    bad_inputs=_bad_inputs,
    stands=True,
    consumable=frozenset({"conv_states"}),
    second_form=_by_torch,
    whole_batch=True,
    outputs=(Within(), Exact()),
    tolerances=TOLERANCES,
)
