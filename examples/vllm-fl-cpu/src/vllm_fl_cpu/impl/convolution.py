"""Short convolutions, on vLLM's C++ CPU kernels."""

from __future__ import annotations

import torch

from . import implementation, kernel

__all__ = [
    "OPS",
    "causal_conv1d",
    "causal_conv1d_update",
]

BLOCK = 32
"""Features that the kernel for whole sequences takes together."""

WIDTH = 4
"""Taps of that kernel."""

NO_SLOT = -1
"""What that kernel is told to take for padding: nothing."""

NULL_BLOCK = 0
"""What the kernel for single tokens is told to take for padding."""


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
    """The products in bfloat16, their sum and the activation in fp32, rounded once.

    The kernel works on copies of the states.

    Args:
        x: (tokens, dim), bfloat16, of any layout; dim a multiple of 32.
        weight: (dim, 4), bfloat16.
        bias: (dim,), bfloat16, or None.
        conv_states: (slots, dim, 3), bfloat16, of any layout; overwritten.
        query_start_loc, cache_indices: int32 or int64, as the contract has them.
        has_initial_state: (sequences,), bool.
        activation: "silu" or None.

    Returns:
        (out, conv_states): out of x's shape and dtype, and the same conv_states.

    Raises:
        ValueError: a slot that conv_states does not have, or sequences beyond x.
        RuntimeError: the kernel refuses its arguments.
    """
    # The kernel looks at none of these numbers before it follows them.
    if bool(((cache_indices < 1) | (cache_indices >= len(conv_states))).any()):
        raise ValueError(f"cache_indices must be from 1 to {len(conv_states) - 1}")
    ends = query_start_loc.tolist()
    if ends != sorted(ends) or ends[0] != 0 or ends[-1] != len(x):
        raise ValueError(f"query_start_loc must rise from 0 to {len(x)}, got {ends}")
    # It would write zeros into the state of an empty sequence.
    some = query_start_loc.diff() > 0
    starts = torch.cat((query_start_loc[:1], query_start_loc[1:][some]))
    # It takes any cache for one whose features lie side by side, and says so in its strides.
    rows = cache_indices[some].long()
    taps = conv_states[rows].transpose(1, 2).contiguous()
    out = kernel("causal_conv1d_fwd_cpu")(
        x.contiguous().T,
        weight.contiguous(),
        bias,
        taps.transpose(1, 2),
        starts.int(),
        torch.arange(len(rows), dtype=torch.int32),
        has_initial_state[some],
        activation == "silu",
        NO_SLOT,
        False,
    )
    conv_states[rows] = taps.transpose(1, 2)
    return out.T.contiguous(), conv_states


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    conv_state_indices: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """In fp32, rounded once.

    Args:
        x: (tokens, dim), float32, float16 or bfloat16, of any layout.
        conv_state: (slots, dim, width - 1), of x's dtype, of any layout; overwritten.
        weight: (dim, width), of x's dtype.
        bias: (dim,), of x's dtype, or None.
        activation: "silu" or None.
        conv_state_indices: (tokens,), int32 or int64; 0 is padding.

    Returns:
        (out, conv_state): out of x's shape and dtype, x itself for padding; the same conv_state.

    Raises:
        ValueError: a slot that conv_state does not have.
        RuntimeError: the kernel refuses its arguments.
    """
    # The kernel follows these numbers without a look at them.
    if bool(((conv_state_indices < 0) | (conv_state_indices >= len(conv_state))).any()):
        raise ValueError(f"conv_state_indices must be from 0 to {len(conv_state) - 1}")
    out = kernel("causal_conv1d_update_cpu_vec")(
        x.contiguous(),
        conv_state,
        weight.contiguous(),
        bias,
        activation,
        conv_state_indices.int(),
        None,
        NULL_BLOCK,
    )
    return out, conv_state


OPS = (
    implementation(
        causal_conv1d,
        "causal_conv1d_fwd_cpu",
        takes=(
            "x.dtype == torch.bfloat16",
            f"dim % {BLOCK} == 0 and width == {WIDTH}",
            "state_len == width - 1",
        ),
        consumes=("conv_states",),
    ),
    implementation(
        causal_conv1d_update,
        "causal_conv1d_update_cpu_vec",
        takes=("state_len == width - 1",),  # of others it takes another column for the newest
        consumes=("conv_state",),
    ),
)
