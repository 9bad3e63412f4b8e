"""The short convolution for one token of each sequence, in decode of linear attention and Mamba."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.arguments import Problem, integers, like, tensor, word
from vllm_fl.contracts.outputs import Exact, Within
from vllm_fl.contracts.sampling import Source
from vllm_fl.contracts.spec import Sample

from .causal_conv1d import BIAS, CONV_STATES, CONV_TOLERANCES, WEIGHT, served_features
from .common import beyond, contract
from .sequences import OF_SEQUENCES, sample, slots, state_slots

if TYPE_CHECKING:
    import torch


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    conv_state_indices: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out = act(bias + weight[:, -1] * x + sum of weight[:, i] * state[:, i] for the other taps).

    Each feature is convolved separately. The state is the last width - 1 inputs of the sequence,
    newest last. The call drops the oldest input and adds x.

    Args:
        x: (tokens, dim), float32, float16 or bfloat16, of any layout. Each token is from a
            different sequence.
        conv_state: (slots, dim, state_len), of x's dtype, of any layout, state_len at least
            width - 1. The first width - 1 columns are the state; further columns, for speculative
            decoding, are unchanged.
        weight: (dim, width), of x's dtype, width from 2 to 5.
        bias: (dim,), of x's dtype, or None for 0.
        activation: "silu", or None for no activation.
        conv_state_indices: (tokens,), int32 or int64, distinct except 0: the slots of the tokens'
            sequences. A token with slot 0 is padding. Slot 0 is vLLM's null block, and is not used
            by a sequence. Padding tokens and the null block may contain NaN, which affects nothing
            else.

    Returns:
        (out, conv_state). `out` has x's shape and dtype, and is contiguous; for a padding token it
        equals x. conv_state is like the argument, with the slots of the tokens written. All other
        slots, including slot 0, are unchanged. The inputs are not modified, except conv_state and x
        if the implementation consumes them: it then returns the same tensors.

    Raises:
        CallError: an argument violates this contract. The values of conv_state_indices are not
            checked before the call. On an accelerator, incorrect values cause a device error or
            undefined results.

    Source: Gu and Dao, "Mamba" (arXiv:2312.00752), its depthwise convolution; states and padding:
    vLLM's `causal_conv1d_update`.
    """
    import torch

    rows, width = conv_state_indices.long(), weight.shape[1]
    inputs = torch.cat((conv_state.double()[rows][:, :, : width - 1], x.double()[..., None]), -1)
    out = (inputs * weight.double()).sum(-1)
    if bias is not None:
        out = out + bias.double()
    if activation == "silu":
        out = out * out.sigmoid()
    real = rows != 0
    after = conv_state.double().clone()
    after[rows[real], :, : width - 1] = inputs[real][:, :, 1:]
    return torch.where(real[:, None], out, x.double()), after


def _by_taps(*call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute token by token and tap by tap, and shift the state."""
    x, conv_state, weight, bias, activation, conv_state_indices = call
    import torch.nn.functional as F

    taps = weight.shape[1] - 1
    out, after = x.double().clone(), conv_state.double().clone()
    for token, slot in enumerate(conv_state_indices.tolist()):
        if not slot:
            continue
        total = x[token].double() * weight[:, taps].double()
        for tap in range(taps):
            total = total + after[slot, :, tap] * weight[:, tap].double()
        total = total if bias is None else total + bias.double()
        out[token] = F.silu(total) if activation else total
        rolled = after[slot, :, :taps].roll(-1, dims=1)
        rolled[:, -1] = x[token].double()
        after[slot, :, :taps] = rolled
    return out.contiguous(), after


def _call(
    source: Source, tokens: int, dim: int = 64, width: int = 4, more: int = 0
) -> dict[str, Any]:
    return {
        "x": source.normal(tokens, dim),
        "conv_state": source.normal(tokens + 3, dim, width - 1 + more),
        "weight": source.normal(dim, width, scale=0.5),
        "bias": source.normal(dim),
        "activation": "silu",
        "conv_state_indices": state_slots(tokens, source.device),
    }


def _samples(source: Source) -> Iterator[Sample]:
    for tokens in (16, 1, 0):
        yield sample(f"{tokens} token{'s' * (tokens != 1)}", _call(source, tokens))
    padded = _call(source, 6)
    padded["conv_state_indices"][3:] = 0
    yield sample("padding", padded)
    plain = _call(source, 5, dim=96)
    yield sample("no bias, no activation", plain, bias=None, activation=None)
    yield sample("2 taps, odd sizes", _call(source, 3, dim=7, width=2))
    yield sample("states with room for more", _call(source, 5, dim=32, width=3, more=2))
    views = _call(source, 4, dim=32)
    views["x"] = source.normal(4, 48)[:, 8:40]
    indices = views["conv_state_indices"].long()
    yield sample("a strided x, int64 indices", views, conv_state_indices=indices)
    stale = _call(source, 6, dim=32)
    stale["conv_state_indices"][3:] = 0
    stale["x"][4:], stale["conv_state"][:2] = float("nan"), float("nan")
    yield sample("NaN in padding", stale)
    broken = _call(source, 6, dim=32)
    broken["x"][2, 7] = float("nan")
    yield sample("NaN in a token", broken)


def _also(x: Any, states: Any, weight: Any, bias: Any, activation: Any, indices: Any) -> Problem:
    return slots("conv_state_indices", indices, len(states))


def _bad(good: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    return beyond(good, "conv_state_indices", len(good["conv_state"]))


SPEC = contract(
    causal_conv1d_update,
    {
        "x": tensor("tokens, dim"),
        "weight": WEIGHT,
        "bias": BIAS,
        "conv_state": CONV_STATES,
        "activation": word("silu").optional(),
        "conv_state_indices": integers("tokens"),
    },
    (like("x"), like("conv_state")),
    also=_also,
    overwrites=("x", "conv_state"),
    bad=_bad,
    samples=_samples,
    served=served_features(_call),
    second_form=_by_taps,
    **OF_SEQUENCES,
    outputs=(Within(), Exact()),
    tolerances=CONV_TOLERANCES,
)
