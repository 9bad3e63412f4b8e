"""Binding of `causal_conv1d`: linear attention, Mamba and short convolutions, in prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.contracts.binding import Binding, FunctionTarget, Route, put

from ._hybrid import CONV_SIZES, CONVOLVING, NULL_BLOCK, activation_of, has_states
from ._phrases import names

if TYPE_CHECKING:
    from torch import Tensor

PAD_SLOT = -1
"""The slot of padding in vLLM's function by default, in addition to its null block."""

TAKEN = names(
    "x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, activation, "
    "pad_slot_id"
)
PER_BLOCK = names(
    "block_idx_first_scheduled_token, block_idx_last_scheduled_token, initial_state_idx, "
    "num_computed_tokens"
)
"""Parameters of vLLM up to 0.32 for states that are cached per block of a sequence."""


def _is_plain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor | None,
) -> bool:
    return (
        cache_indices is not None
        and cache_indices.ndim == 1
        and len(query_start_loc) == len(cache_indices) + 1
        and x.dtype == weight.dtype == conv_states.dtype
        and (bias is None or bias.dtype == x.dtype)
    )


def _has_initial_state(has_initial_state: Tensor | None, cache_indices: Tensor) -> Tensor:
    if has_initial_state is not None:
        return has_initial_state
    import torch

    return torch.zeros(len(cache_indices), dtype=torch.bool, device=cache_indices.device)


def _left(results: tuple[Tensor, Tensor], conv_states: Tensor) -> Tensor:
    out, after = results
    put(conv_states, after)
    return out.T


def _target(paths: tuple[str, ...], *further: str) -> FunctionTarget:
    """The target for one release of vLLM; `further` are its parameters in addition to `TAKEN`."""
    return FunctionTarget(
        paths,
        (*TAKEN, *further),
        Route(
            args={
                "x": lambda x: x.T,  # vLLM's x and result are (features, tokens)
                "has_initial_state": _has_initial_state,
                "activation": activation_of,
            },
            constants={"pad_slot_id": PAD_SLOT, "null_block_id": NULL_BLOCK}
            | dict.fromkeys(PER_BLOCK),
            only=_is_plain,
            results=_left,
            own_args={
                "x": lambda x: x.T,
                "block_size_to_align": lambda: 0,
                "metadata": lambda: None,
            },
            own_results=lambda out, conv_states: (out.T.contiguous(), conv_states),
        ),
        grants=("conv_states",),
    )


_OPS = "vllm.model_executor.layers.mamba.ops"
_PATHS = (
    f"{_OPS}.causal_conv1d.causal_conv1d_fn",
    *(f"{module}.causal_conv1d_fn" for module in CONVOLVING),
)

BINDING = Binding(
    targets=(
        _target(_PATHS, "null_block_id", *PER_BLOCK, "block_size_to_align", "metadata"),
        _target(_PATHS, "null_block_id", "metadata"),
        _target(
            (
                f"{_OPS}.cpu.causal_conv1d.causal_conv1d_fn_cpu",
                f"{_OPS}.cpu.gdn_attention.causal_conv1d_torch",
            )
        ),
    ),
    sizes=CONV_SIZES,
    not_reached=(
        "states cached per block of a sequence (`mamba_cache_mode=all`)",
        "CPUs with AVX512-BF16, or bfloat16 on aarch64: vLLM's kernels need weights packed when "
        "they are loaded",
    ),
    when=has_states,
    between_graphs=True,
    formerly=("causal_conv1d_fn",),
)
