"""Mixtures of experts, on torch_npu's operators for grouped rows."""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import implementation
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
    """Sort tokens by expert, multiply in groups, and sum the results of each token.

    Operators: `npu_moe_init_routing_v2`, `npu_grouped_matmul`, the activation's operator,
    `npu_grouped_matmul`, `npu_moe_token_unpermute`. Intermediate results and routing weights are
    rounded to bfloat16, the only supported dtype. Not supported: `expert_map`, biases.

    Raises:
        KeyError: `activation` is unknown.
        IndexError: an id is invalid; on the CPU only.
    """
    if not hidden_states.numel():
        return hidden_states.new_empty(hidden_states.shape)
    experts = w13.shape[0]
    if topk_ids.is_cpu and int(topk_ids.max()) >= experts:  # would synchronise a device
        raise IndexError(f"topk_ids must be below {experts}, got {int(topk_ids.max())}")
    # The kernels require valid ids. Positions without an expert get expert 0 or the last one, with
    # weight 0.
    ids = topk_ids.clamp(0, experts - 1)
    absent = ids != topk_ids
    x, weights = hidden_states, topk_weights.to(hidden_states.dtype).masked_fill(absent, 0.0)
    if apply_router_weight_on_input:
        x, weights = x * weights, torch.ones_like(weights).masked_fill(absent, 0.0)
    tokens, places, counts, _scale = torch.ops.npu.npu_moe_init_routing_v2.default(
        x.contiguous(),
        ids.to(torch.int32).contiguous(),
        active_num=topk_ids.numel(),
        expert_num=experts,
        expert_tokens_num_type=1,  # counts per expert, for `_multiplied`
        expert_tokens_num_flag=True,
        quant_mode=-1,
        active_expert_range=[0, experts],
        row_idx_type=0,
    )
    inner = ACTIVATIONS[activation](_multiplied(tokens, w13, counts))
    out: torch.Tensor = torch.ops.npu.npu_moe_token_unpermute.default(
        _multiplied(inner, w2, counts), places, probs=weights.contiguous()
    )
    return out


def _multiplied(rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Multiply each expert's rows by its matrix.

    Rows are sorted by expert; `counts` has the number of rows of each expert.
    """
    (product,) = torch.ops.npu.npu_grouped_matmul.default(
        [rows],
        [weight.transpose(1, 2)],
        group_list=counts,
        split_item=2,  # one tensor with all results
        group_type=0,  # groups of rows
        group_list_type=1,  # given by counts
    )
    result: torch.Tensor = product
    return result


OPS = (
    implementation(
        fused_experts,
        "hidden_states.dtype == torch.bfloat16",
        "expert_map is None",
        "w13_bias is None and w2_bias is None",
    ),
)
