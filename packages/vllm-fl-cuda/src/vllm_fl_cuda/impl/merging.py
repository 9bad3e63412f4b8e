"""Merging of attention results for two sets of keys, on vLLM's CUDA kernel."""

from __future__ import annotations

import torch

from . import implementation, kernel

__all__ = ["OPS", "merge_attn_states"]

VECTOR = 16
"""Bytes of one load; an unaligned address destroys the process's CUDA context."""


def merge_attn_states(
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Average both outputs with weights exp(lse), in fp32, rounded once.

    If neither side had keys, output is prefix_output.
    """
    output = prefix_output.new_empty(prefix_output.shape)
    # Heads first, without gaps, because vLLM 0.26's kernel ignores strides of the log-sum-exps.
    sums = prefix_lse.new_empty(prefix_lse.shape[::-1])
    if output.numel():  # an empty grid is a launch error
        if not _one_grid(prefix_output, suffix_output):
            prefix_output, suffix_output = _packed(prefix_output), _packed(suffix_output)
        kernel("merge_attn_states")(
            output,
            sums,
            prefix_output,
            prefix_lse.T.contiguous(),
            suffix_output,
            suffix_lse.T.contiguous(),
            None,
        )
    return output, sums.T.contiguous()


def _one_grid(prefix: torch.Tensor, suffix: torch.Tensor) -> bool:
    """Return whether both tensors have the head stride of the prefix, at aligned addresses."""
    side = prefix.stride(1)
    wanted = (prefix.shape[1] * side, side, 1)
    return (
        prefix.stride() == suffix.stride() == wanted
        and not (side * prefix.itemsize) % VECTOR
        and not prefix.data_ptr() % VECTOR
        and not suffix.data_ptr() % VECTOR
    )


def _packed(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    return x.clone() if x.data_ptr() % VECTOR else x


OPS = (
    implementation(
        merge_attn_states,
        "merge_attn_states",
        takes=(f"head_size * prefix_output.itemsize % {VECTOR} == 0",),
    ),
)
