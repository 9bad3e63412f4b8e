"""Where vLLM runs `causal_conv1d_update`: linear attention, Mamba and short convolutions, in
decode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.binding import Binding, Bound, FunctionPlace, OperatorPlace, put

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


def _through(
    op: Bound,
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: bool | str | None,
    indices: Tensor | None,
    starts: Tensor | None,
    null_block: int,
) -> Any:
    """(out, the states after) of a call with one token of each sequence, or NotImplemented."""
    if (
        x.ndim != 2
        or starts is not None
        or indices is None
        or indices.ndim != 1
        or len(indices) != len(x)
        or null_block != NULL_BLOCK
        or not x.dtype == weight.dtype == conv_state.dtype
        or (bias is not None and bias.dtype != x.dtype)
    ):
        return NotImplemented
    return op(x, conv_state, weight, bias, activation_of(activation), indices)


def _function(op: Bound) -> Bound:
    def function(
        x: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: bool | str | None,
        conv_state_indices: Tensor | None,
        num_accepted_tokens: Tensor | None,
        query_start_loc: Tensor | None,
        max_query_len: int,
        null_block_id: int,
        *further: Any,
    ) -> Any:
        """`further`: two for states cached per block in some releases, and whether to check."""
        if num_accepted_tokens is not None or any(each is not None for each in further[:-1]):
            return NotImplemented
        done = _through(
            op,
            x,
            conv_state,
            weight,
            bias,
            activation,
            conv_state_indices,
            query_start_loc,
            null_block_id,
        )
        if done is NotImplemented:
            return done
        put((x, conv_state), done)  # vLLM's function overwrites x, too
        return x

    return function


def _from_function(own: Bound) -> Bound:
    def op(
        x: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        conv_state_indices: Tensor,
    ) -> tuple[Tensor, Tensor]:
        out = own(x, conv_state, weight, bias, activation, conv_state_indices=conv_state_indices)
        return out, conv_state

    return op


def _into(op: Bound) -> Bound:
    """The CPU build's operator, which leaves x as it is, whatever its schema says."""

    def kernel(
        x: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        conv_state_indices: Tensor | None,
        query_start_loc: Tensor | None,
        pad_slot_id: int,
    ) -> Any:
        done = _through(
            op,
            x,
            conv_state,
            weight,
            bias,
            activation,
            conv_state_indices,
            query_start_loc,
            pad_slot_id,
        )
        if done is NotImplemented:
            return done
        out, after = done
        put(conv_state, after)
        return out

    return kernel


def _from(replaced: Bound) -> Bound:
    def op(
        x: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        conv_state_indices: Tensor,
    ) -> tuple[Tensor, Tensor]:
        out = replaced(
            x, conv_state, weight, bias, activation, conv_state_indices, None, NULL_BLOCK
        )
        return out, conv_state

    return op


_PATHS = (
    "vllm.model_executor.layers.mamba.ops.causal_conv1d.causal_conv1d_update",
    *(f"{module}.causal_conv1d_update" for module in CONVOLVING),
)
_TAKEN = (
    "x",
    "conv_state",
    "weight",
    "bias",
    "activation",
    "conv_state_indices",
    "num_accepted_tokens",
    "query_start_loc",
    "max_query_len",
    "null_block_id",
)

BINDING = Binding(
    places=(
        # Releases up to 0.32, which may cache states per block of a sequence, and later ones.
        *(
            FunctionPlace(
                _PATHS,
                (*_TAKEN, *blocks, "validate_data"),
                _function,
                _from_function,
                grants=("x", "conv_state"),
                tokens="x",
            )
            for blocks in (("block_idx_last_scheduled_token", "initial_state_idx"), ())
        ),
        OperatorPlace(
            "_C::causal_conv1d_update_cpu_vec",
            (
                "x",
                "conv_state",
                "weight",
                "bias",
                "activation",
                "conv_state_indices",
                "query_start_loc",
                "pad_slot_id",
            ),
            _into,
            _from,
            grants=("conv_state",),
            tokens="x",
        ),
    ),
    sizes=(CONV_BIAS, CONV_FEATURES, CONV_TAPS),
    not_reached=(
        "speculative decoding, whose sequences bring several tokens",
        "states that are cached per block of a sequence (`mamba_cache_mode=all`)",
        "CPUs with AVX512-BF16, or bfloat16 on aarch64: vLLM's kernels there take weights that it "
        "packed as it loaded them",
    ),
    when=has_states,
    between_graphs=True,
)
