"""Mixtures of experts, on FlagGems's Triton kernels."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch

from ..loading import flag_gems_module
from . import implementation
from .routing import of_experts


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
    """Run FlagGems's `fused_experts_impl`. Intermediate results are rounded; the sum is in fp32.

    Not supported: float32, activations other than "silu", biases together with weights on the
    input. `global_num_experts` is ignored. An invalid id raises IndexError on the CPU only.
    """
    count = len(w13) if expert_map is None else len(expert_map)
    ids, absent = of_experts(topk_ids, count)
    out: torch.Tensor = _kernels().fused_experts_impl(
        hidden_states.contiguous(),
        w13.contiguous(),
        w2.contiguous(),
        # The kernels ignore strides of the routing, and write outside their memory for an invalid
        # id. A position with an invalid id gets a valid id, with weight 0.
        topk_weights.masked_fill(absent, 0.0).contiguous(),
        ids.contiguous(),
        activation=activation,
        apply_router_weight_on_input=apply_router_weight_on_input,
        global_num_experts=-1 if expert_map is None else expert_map.numel(),
        expert_map=expert_map,
        w1_bias=w13_bias,
        w2_bias=w2_bias,
    )
    return out


@cache
def _kernels() -> Any:
    """Return FlagGems's module.

    The module repeats its warnings in every call; each is logged only once.
    """
    module = flag_gems_module("fused.fused_moe")
    said: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return message not in said and not said.add(message)  # type: ignore[func-returns-value]

    logging.getLogger(module.__name__).addFilter(is_new)
    return module


OPS = (
    implementation(
        fused_experts,
        "hidden_states.dtype != torch.float32",  # the kernels would use TF32, with 10 bits
        "activation == 'silu'",
        # The kernels also multiply the bias by the weight, which belongs only to the input.
        "not apply_router_weight_on_input or w13_bias is None",
    ),
)
