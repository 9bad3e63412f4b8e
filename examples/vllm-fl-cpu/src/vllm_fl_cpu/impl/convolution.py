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
"""The kernel for whole sequences needs a multiple of this many features."""

WIDTH = 4
"""The only filter width of that kernel."""

NO_SLOT = -1
"""Padding slot for the sequence kernel: none."""

NULL_BLOCK = 0
"""Padding slot for the single-token kernel."""


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
    """Compute products in bfloat16, and their sum and the activation in fp32, rounded once.

    The kernel works on copies of the states.

    Args:
        x: (tokens, dim), bfloat16, any layout; dim a multiple of 32.
        weight: (dim, 4), bfloat16.
        bias: (dim,), bfloat16, or None.
        conv_states: (slots, dim, 3), bfloat16, any layout; overwritten.
        query_start_loc, cache_indices: int32 or int64, see the contract.
        has_initial_state: (sequences,), bool.
        activation: "silu" or None.

    Returns:
        (out, conv_states). `out` has x's shape and dtype; conv_states is the argument.

    Raises:
        ValueError: a cache index is not in 1, …, slots - 1, or query_start_loc does not rise from 0
            to tokens.
        RuntimeError: the kernel rejects its arguments.
    """
    # The kernel uses these numbers as indices without checking them.
    if bool(((cache_indices < 1) | (cache_indices >= len(conv_states))).any()):
        raise ValueError(f"cache_indices must be from 1 to {len(conv_states) - 1}")
    ends = query_start_loc.tolist()
    if ends != sorted(ends) or ends[0] != 0 or ends[-1] != len(x):
        raise ValueError(f"query_start_loc must rise from 0 to {len(x)}, got {ends}")
    # The kernel would write zeros into the state of an empty sequence.
    some = query_start_loc.diff() > 0
    starts = torch.cat((query_start_loc[:1], query_start_loc[1:][some]))
    # The kernel assumes adjacent features, with the strides of a transposed tensor.
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
    """Compute in fp32, rounded once.

    Args:
        x: (tokens, dim), float32, float16 or bfloat16, any layout.
        conv_state: (slots, dim, width - 1), with x's dtype, any layout; overwritten.
        weight: (dim, width), with x's dtype.
        bias: (dim,), with x's dtype, or None.
        activation: "silu" or None.
        conv_state_indices: (tokens,), int32 or int64; 0 is padding.

    Returns:
        (out, conv_state). `out` has x's shape and dtype, and equals x for padding; conv_state is
        the argument.

    Raises:
        ValueError: a slot is outside conv_state.
        RuntimeError: the kernel rejects its arguments.
    """
    # The kernel uses these numbers as indices without checking them.
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
        takes=("state_len == width - 1",),  # otherwise it uses another column
        consumes=("conv_state",),
    ),
)
