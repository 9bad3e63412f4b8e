"""Mixtures of experts, expert by expert in PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from . import implementations
from .activation import gelu_and_mul, silu_and_mul, swigluoai_and_mul

__all__ = ["OPS", "fused_experts"]

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu_and_mul,
    "gelu": gelu_and_mul,
    "gelu_tanh": lambda x: gelu_and_mul(x, "tanh"),
    "swigluoai": swigluoai_and_mul,
}


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
    """Compute expert by expert. Each expert's result is rounded; the sum is in fp32.

    The host counts the tokens of each expert, which synchronises with the device. During CUDA graph
    capture this is impossible, so every expert computes all tokens, which is experts / k times the
    work.

    An invalid id raises IndexError on the CPU only.
    """
    act = ACTIVATIONS[activation]
    x = hidden_states
    if apply_router_weight_on_input:
        x = x * topk_weights.to(x.dtype)
    rows, count = topk_ids.long(), w13.shape[0] if expert_map is None else len(expert_map)
    if rows.is_cpu and rows.numel() and int(rows.max()) >= count:  # would synchronise a device
        raise IndexError(f"topk_ids must be below {count}, got {int(rows.max())}")
    if expert_map is not None:
        rows = torch.where(rows < 0, rows, expert_map.long()[rows.clamp(min=0)])
    slots = x.new_zeros((*rows.shape, x.shape[1]))

    def computed(tokens: torch.Tensor, expert: int) -> torch.Tensor:
        inner = F.linear(tokens, w13[expert], None if w13_bias is None else w13_bias[expert])
        bias = None if w2_bias is None else w2_bias[expert]
        return F.linear(act(inner), w2[expert], bias)

    counts = not _is_captured(x)
    for expert in range(w13.shape[0]):
        taken = rows == expert
        if not counts:
            slots = torch.where(taken.unsqueeze(-1), computed(x, expert).unsqueeze(1), slots)
            continue
        token, slot = taken.nonzero(as_tuple=True)
        if token.numel():
            slots[token, slot] = computed(x[token], expert)
    summands = slots.float()
    if not apply_router_weight_on_input:
        shares = topk_weights.float().masked_fill(topk_ids < 0, 0.0)
        summands *= shares.unsqueeze(-1)
    return summands.sum(dim=1).to(x.dtype)


def _is_captured(x: torch.Tensor) -> bool:
    """Return whether a CUDA graph is being captured on x's device."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


# Not traceable: the number of tokens per expert depends on the routing.
OPS = implementations(fused_experts, traceable=False)
