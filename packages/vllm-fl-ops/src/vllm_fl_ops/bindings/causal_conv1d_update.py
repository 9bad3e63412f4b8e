"""Binding of `causal_conv1d_update`: linear attention, Mamba and short convolutions, in decode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.binding import Binding, FunctionTarget, OperatorTarget, Route, put
from vllm_fl.contracts.routes import Selection

from ._hybrid import CONV_SIZES, CONVOLVING, NULL_BLOCK, activation_of, has_states
from ._phrases import names

if TYPE_CHECKING:
    from torch import Tensor


def _is_one_each(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state_indices: Tensor | None,
) -> bool:
    """Return whether a call has one token of each sequence."""
    return (
        x.ndim == 2
        and conv_state_indices is not None
        and conv_state_indices.ndim == 1
        and len(conv_state_indices) == len(x)
        and x.dtype == weight.dtype == conv_state.dtype
        and (bias is None or bias.dtype == x.dtype)
    )


def _over_x(results: tuple[Tensor, Tensor], x: Tensor, conv_state: Tensor) -> Tensor:
    """Write the result into x, like vLLM's function."""
    put((x, conv_state), results)
    return x


def _beside_x(results: tuple[Tensor, Tensor], conv_state: Tensor) -> Tensor:
    """Return the result and keep x, like the CPU build's operator (though its schema mutates x)."""
    out, after = results
    put(conv_state, after)
    return out


def _route(results: Selection, constants: dict[str, Any]) -> Route:
    return Route(
        args={"activation": activation_of},
        constants={"query_start_loc": None, **constants},
        only=_is_one_each,
        results=results,
        own_args={"max_query_len": lambda: -1, "validate_data": lambda: False},
        own_results=lambda out, conv_state: (out, conv_state),
    )


_PATHS = (
    "vllm.model_executor.layers.mamba.ops.causal_conv1d.causal_conv1d_update",
    *(f"{module}.causal_conv1d_update" for module in CONVOLVING),
)
_TAKEN = names(
    "x, conv_state, weight, bias, activation, conv_state_indices, num_accepted_tokens, "
    "query_start_loc, max_query_len, null_block_id"
)

BINDING = Binding(
    targets=(
        # Releases up to 0.32, which may cache states per block of a sequence, and later releases.
        *(
            FunctionTarget(
                _PATHS,
                (*_TAKEN, *blocks, "validate_data"),
                _route(
                    _over_x,
                    {
                        "null_block_id": NULL_BLOCK,
                        **dict.fromkeys(("num_accepted_tokens", *blocks)),
                    },
                ),
                grants=("x", "conv_state"),
                tokens="x",
            )
            for blocks in (("block_idx_last_scheduled_token", "initial_state_idx"), ())
        ),
        OperatorTarget(
            "_C::causal_conv1d_update_cpu_vec",
            names(
                "x, conv_state, weight, bias, activation, conv_state_indices, query_start_loc, "
                "pad_slot_id"
            ),
            _route(_beside_x, {"pad_slot_id": NULL_BLOCK}),
            grants=("conv_state",),
            tokens="x",
        ),
    ),
    sizes=CONV_SIZES,
    not_reached=(
        "speculative decoding, with several tokens per sequence",
        "states cached per block of a sequence (`mamba_cache_mode=all`)",
        "CPUs with AVX512-BF16, or bfloat16 on aarch64: vLLM's kernels need weights packed when "
        "they are loaded",
    ),
    when=has_states,
    between_graphs=True,
)
