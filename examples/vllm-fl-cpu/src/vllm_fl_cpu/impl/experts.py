"""Mixtures of experts, on vLLM's C++ CPU kernels."""

from __future__ import annotations

import torch

from vllm_fl import Availability

from . import cuts_off, implementation, kernel

__all__ = ["OPS", "fused_experts"]

TILE = 32
"""Features of one tile of the kernel, which has no code for a part of one."""

ISA = "vec"
"""The kernel that every processor has. Those with matrix units serve bf16 faster by another."""


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
    """Packs the weights for the kernel and calls it.

    Packing takes longer than the kernel does for a few tokens, and is done in every call. An engine
    that has this implementation first does not call it: vLLM packs the weights once, when they are
    loaded, and calls the same kernel itself.

    Args:
        hidden_states: (tokens, hidden), float32, float16 or bfloat16; hidden a multiple of 32.
        w13: (experts, 2 * intermediate, hidden), of the same dtype; intermediate a multiple of 32.
        w2: (experts, hidden, intermediate), of the same dtype.
        topk_weights: (tokens, k), floating.
        topk_ids: (tokens, k), int32 or int64, negative in a place without an expert.
        activation: "silu", "gelu", "gelu_tanh" or "swigluoai".
        apply_router_weight_on_input: whether the weight multiplies the input; for k = 1.
        global_num_experts: not read.
        expert_map: None.
        w13_bias: (experts, 2 * intermediate), of the same dtype.
        w2_bias: (experts, hidden), of the same dtype.

    Returns:
        (tokens, hidden), of hidden_states' dtype.

    Raises:
        RuntimeError: the kernel refuses its arguments.
        IndexError: an id beyond the experts.
    """
    # Whatever an id is, the kernel reads weights there: a place without an expert counts nothing of
    # another one.
    if topk_ids.numel() and int(topk_ids.max()) >= len(w13):
        raise IndexError(f"topk_ids must be below {len(w13)}, got {int(topk_ids.max())}")
    absent = topk_ids < 0
    ids = topk_ids.clamp(min=0).to(torch.int32).contiguous()
    x, weights = hidden_states.contiguous(), topk_weights.masked_fill(absent, 0.0).contiguous()
    if apply_router_weight_on_input:
        # Told so, the kernel would overwrite the weights.
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
