"""Mixtures of experts, on vLLM's C++ CPU kernels."""

from __future__ import annotations

import torch

from vllm_fl import Availability

from . import cuts_off, implementation, kernel

__all__ = ["OPS", "fused_experts"]

TILE = 32
"""Features per tile of the kernel, which cannot process partial tiles."""

ISA = "vec"
"""The kernel variant for any processor. With matrix units, there is a faster variant for bf16."""


def fused_experts(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pack the weights for the kernel and call it.

    Every call packs the weights, which takes longer than the kernel for a few tokens. An engine
    that plans this implementation does not call it, because vLLM packs the weights once on loading
    and calls the same kernel itself.

    Args:
        hidden_states: (tokens, hidden), float32, float16 or bfloat16; hidden a multiple of 32.
        w13: (experts, 2 * intermediate, hidden), same dtype; intermediate a multiple of 32.
        w2: (experts, hidden, intermediate), same dtype.
        topk_weights: (tokens, k), floating point.
        topk_ids: (tokens, k), int32 or int64; negative for a missing expert.
        activation: "silu", "gelu", "gelu_tanh" or "swigluoai".
        apply_router_weight_on_input: whether the weight multiplies the input; only for k = 1.
        global_num_experts: ignored.
        expert_map: None.
        w13_bias: (experts, 2 * intermediate), same dtype.
        w2_bias: (experts, hidden), same dtype.

    Returns:
        (tokens, hidden), with hidden_states' dtype.

    Raises:
        RuntimeError: the kernel rejects its arguments.
        IndexError: an id is too large.
    """
    # The kernel reads the weights of every id, so replace missing experts by expert 0, weight 0.
    if topk_ids.numel() and int(topk_ids.max()) >= len(w13):
        raise IndexError(f"topk_ids must be below {len(w13)}, got {int(topk_ids.max())}")
    absent = topk_ids < 0
    ids = topk_ids.clamp(min=0).to(torch.int32).contiguous()
    x, weights = hidden_states.contiguous(), topk_weights.masked_fill(absent, 0.0).contiguous()
    if apply_router_weight_on_input:
        # Scale here, because the kernel would overwrite the weights.
        x, weights = x * weights.to(x.dtype), torch.ones_like(weights).masked_fill(absent, 0.0)
    out = torch.empty_like(x)
    kernel("cpu_fused_moe")(
        out,
        x,
        _packed(w13),
        _packed(w2),
        None if w13_bias is None else w13_bias.contiguous(),
        None if w2_bias is None else w2_bias.contiguous(),
        weights.to(torch.float32),
        ids,
        False,
        activation,
        ISA,
    )
    return out


def _packed(weight: torch.Tensor) -> torch.Tensor:
    packed = torch.empty_like(weight, memory_format=torch.contiguous_format)
    kernel("prepack_moe_weight")(weight.contiguous(), packed, ISA)
    return packed


def _is_rounded(hidden_states: torch.Tensor) -> Availability:
    if not cuts_off(hidden_states.dtype):
        return True
    return (
        f"the kernel truncates {hidden_states.dtype} on this processor instead of rounding, and "
        "float32 copies of all weights would cost too much"
    )


OPS = (
    implementation(
        fused_experts,
        "cpu_fused_moe",
        "prepack_moe_weight",
        takes=(
            "expert_map is None",
            f"hidden % {TILE} == 0 and intermediate % {TILE} == 0",
            _is_rounded,
        ),
    ),
)
