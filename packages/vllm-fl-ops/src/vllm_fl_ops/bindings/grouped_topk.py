"""Binding of `grouped_topk`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.binding import Binding, Bound, FunctionTarget, LayerTarget, Route

from ._experts import EXPERT_COUNT, EXPERT_GROUPS, EXPERTS_OF_A_TOKEN, GROUPS_OF_A_TOKEN
from ._models import has_experts, mentions
from ._phrases import names

if TYPE_CHECKING:
    from torch import Tensor

_ROUTER = "vllm.model_executor.layers.fused_moe.router"


def _native(
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int,
    topk_group: int,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import grouped_topk

    own = getattr(grouped_topk, "__wrapped__", grouped_topk)  # vLLM compiles it at its first call
    logits = gating_output.float()  # like the CPU build: 16-bit scores tie
    routing: tuple[Tensor, Tensor] = own(
        logits,  # as hidden states: only their number is read
        logits,
        topk,
        renormalize,
        num_expert_group,
        topk_group,
        scoring_func,
        routed_scaling_factor,
        e_score_correction_bias,
    )
    return routing


def _from_hidden_states(layer: Any, op: Bound) -> Bound:
    def forward(
        hidden_states: Tensor,
        gating_output: Tensor,
        e_score_correction_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        routing: tuple[Tensor, Tensor] = op(gating_output, e_score_correction_bias)
        return routing

    return forward


_CPU = names(
    "gating_output, topk, renormalize, num_expert_group, topk_group, scoring_func, "
    "routed_scaling_factor, e_score_correction_bias"
)

BINDING = Binding(
    targets=(
        LayerTarget(
            f"{_ROUTER}.grouped_topk_router.GroupedTopk", _native, adapt=_from_hidden_states
        ),
        # vLLM's router calls this function without a layer. It calls `_moe_C::grouped_topk`.
        FunctionTarget(
            (f"{_ROUTER}.grouped_topk_router.grouped_topk",),
            ("hidden_states", *_CPU),
            Route(own_args={"hidden_states": lambda gating_output: gating_output}),
            tokens="gating_output",
        ),
        # The CPU build, since the first release with this module.
        FunctionTarget(
            (f"{_ROUTER}.cpu_router._grouped_topk",), _CPU, Route(), tokens="gating_output"
        ),
    ),
    sizes=(EXPERT_COUNT, EXPERTS_OF_A_TOKEN, EXPERT_GROUPS, GROUPS_OF_A_TOKEN),
    not_reached=(
        "experts with a kernel that also routes (FlashInfer's monolithic TensorRT-LLM experts), "
        "and AITER's routing on ROCm",
        "models with a single group, which vLLM routes by `moe_topk`",
        "vLLM's CPU build: compiled models, where routing is part of the graph, and releases "
        "without their own router",
    ),
    when=lambda config: has_experts(config) and mentions("group")(config),
)
