"""Short convolutions, equal to the PyTorch code in vLLM's CPU build."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from . import implementations

__all__ = ["OPS", "causal_conv1d", "causal_conv1d_update"]


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
    """Convolve sequence by sequence; the convolution is rounded before the activation.

    Raises:
        ValueError: a slot is below 1 (PyTorch would silently count from the end), or
            query_start_loc does not rise from 0 to tokens.
        IndexError: conv_states does not have a slot.
    """
    _refuse_strange_slots(cache_indices, 1)
    at, slots = query_start_loc.tolist(), cache_indices.tolist()
    if [0, *sorted(at[1:-1]), len(x)] != at:
        raise ValueError(f"query_start_loc must rise from 0 to {len(x)}, got {at}")
    taps = weight.shape[1] - 1
    out = x.new_empty(x.shape)
    rows = zip(slots, has_initial_state.tolist(), pairwise(at), strict=False)
    for slot, has, (begin, end) in rows:
        if begin == end:
            continue
        state = conv_states[slot, :, :taps]
        inputs = torch.cat((state if has else torch.zeros_like(state), x[begin:end].T), dim=-1)
        out[begin:end] = _convolved(inputs[None], weight, bias, activation)[0].T
        state.copy_(inputs[:, -taps:])
    return out, conv_states


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    conv_state_indices: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve all tokens at once; the convolution is rounded before the activation.

    Raises:
        ValueError: a slot is negative; PyTorch would silently count from the end.
        IndexError: conv_state does not have a slot.
    """
    _refuse_strange_slots(conv_state_indices, 0)
    taps, real = weight.shape[1] - 1, conv_state_indices != 0
    rows = conv_state_indices[real].long()
    inputs = torch.cat((conv_state[rows, :, :taps], x[real].unsqueeze(-1)), dim=-1)
    out = x.clone(memory_format=torch.contiguous_format)
    if len(rows):
        out[real] = _convolved(inputs, weight, bias, activation)[:, :, 0]
    conv_state[rows, :, :taps] = inputs[:, :, 1:]
    return out, conv_state


def _convolved(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    out = F.conv1d(inputs, weight.unsqueeze(1), bias, groups=len(weight))
    return F.silu(out) if activation == "silu" else out


def _refuse_strange_slots(slots: torch.Tensor, least: int) -> None:
    if bool((slots < least).any()):
        raise ValueError(f"slots must be {least} or more")


OPS = (
    *implementations(causal_conv1d, consumes=("conv_states",), traceable=False),
    *implementations(causal_conv1d_update, consumes=("conv_state",), traceable=False),
)
