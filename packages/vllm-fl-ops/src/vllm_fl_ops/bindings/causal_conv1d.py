"""Where vLLM runs `causal_conv1d`: linear attention, Mamba and short convolutions, in prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.binding import Binding, Bound, FunctionPlace, put

from ._hybrid import (
    CONV_BIAS,
    CONV_FEATURES,
    CONV_TAPS,
    CONVOLVING,
    NULL_BLOCK,
    activation_of,
    has_states,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]

PAD_SLOT = -1
"""What vLLM's function takes for padding beside its null block, unless it is told otherwise."""

TAKEN = (
    "x",
    "weight",
    "bias",
    "conv_states",
    "query_start_loc",
    "cache_indices",
    "has_initial_state",
    "activation",
    "pad_slot_id",
)
PER_BLOCK = (
    "block_idx_first_scheduled_token",
    "block_idx_last_scheduled_token",
    "initial_state_idx",
    "num_computed_tokens",
    "block_size_to_align",
)
"""What releases up to 0.32 are told where states are cached per block of a sequence."""


def _through(
    op: Bound,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    starts: Tensor,
    indices: Tensor | None,
    has: Tensor | None,
    activation: bool | str | None,
    pad: int,
) -> Any:
    """A call by the parameters of `TAKEN`; x and the result are features by tokens there."""
    if (
        indices is None
        or indices.ndim != 1
        or len(starts) != len(indices) + 1
        or pad != PAD_SLOT
        or not x.dtype == weight.dtype == states.dtype
        or (bias is not None and bias.dtype != x.dtype)
    ):
        return NotImplemented
    if has is None:
        import torch

        has = torch.zeros(len(indices), dtype=torch.bool, device=x.device)
    out, after = op(x.T, weight, bias, states, starts, indices, has, activation_of(activation))
    put(states, after)
    return out.T


def _on_cpu(op: Bound) -> Bound:
    def function(*args: Any) -> Any:
        return _through(op, *args)

    return function


def _with_null_block(op: Bound) -> Bound:
    def function(*args: Any) -> Any:
        *taken, null_block, _ = args
        return _through(op, *taken) if null_block == NULL_BLOCK else NotImplemented

    return function


def _with_blocks(op: Bound) -> Bound:
    def function(*args: Any) -> Any:
        *taken, null_block, first, last, initial, computed, _, _ = args
        by_block = any(x is not None for x in (first, last, initial, computed))
        return NotImplemented if by_block or null_block else _through(op, *taken)

    return function


def _from(own: Bound) -> Bound:
    def op(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        conv_states: Tensor,
        query_start_loc: Tensor,
        cache_indices: Tensor,
        has_initial_state: Tensor,
        activation: str | None = "silu",
    ) -> tuple[Tensor, Tensor]:
        out = own(
            x.T,
            weight,
            bias,
            conv_states,
            query_start_loc,
            cache_indices=cache_indices,
            has_initial_state=has_initial_state,
            activation=activation,
        )
        return out.T.contiguous(), conv_states

    return op


_OPS = "vllm.model_executor.layers.mamba.ops"
_PATHS = (
    f"{_OPS}.causal_conv1d.causal_conv1d_fn",
    *(f"{module}.causal_conv1d_fn" for module in CONVOLVING),
)

BINDING = Binding(
    places=(
        FunctionPlace(
            _PATHS,
            (*TAKEN, "null_block_id", *PER_BLOCK, "metadata"),
            _with_blocks,
            _from,
            grants=("conv_states",),
        ),
        FunctionPlace(
            _PATHS,
            (*TAKEN, "null_block_id", "metadata"),
            _with_null_block,
            _from,
            grants=("conv_states",),
        ),
        FunctionPlace(
            (
                f"{_OPS}.cpu.causal_conv1d.causal_conv1d_fn_cpu",
                f"{_OPS}.cpu.gdn_attention.causal_conv1d_torch",
            ),
            TAKEN,
            _on_cpu,
            _from,
            grants=("conv_states",),
        ),
    ),
    sizes=(CONV_BIAS, CONV_FEATURES, CONV_TAPS),
    not_reached=(
        "states that are cached per block of a sequence (`mamba_cache_mode=all`)",
        "CPUs with AVX512-BF16, or bfloat16 on aarch64: vLLM's kernels there take weights that it "
        "packed as it loaded them",
    ),
    when=has_states,
    between_graphs=True,
    formerly=("causal_conv1d_fn",),
)
