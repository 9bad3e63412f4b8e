"""Binding of `moe_topk`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.contracts.binding import Binding, FunctionTarget, OperatorTarget, Route

from ._experts import EXPERT_COUNT, EXPERTS_OF_A_TOKEN
from ._models import has_experts
from ._phrases import names

if TYPE_CHECKING:
    from torch import Tensor


def _marked(routing: tuple[Tensor, Tensor], is_padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the routing as vLLM's kernels do: padding tokens have no expert (-1)."""
    weights, ids = routing
    return weights, ids if is_padding is None else ids.masked_fill(is_padding.unsqueeze(-1), -1)


def _rows(gating_output: Tensor, topk: int) -> Tensor:
    """Return a tensor that kernels write and no supported release of vLLM reads."""
    from torch import int32

    return gating_output.new_empty((gating_output.shape[0], topk), dtype=int32)


_TAKEN = names("topk_weights, topk_indices, token_expert_indices, gating_output, renormalize, bias")


def _operator(scores: str, *further: str) -> OperatorTarget:
    """The target for one scoring function; `further` are parameters of some releases only."""
    pads = "is_padding" in further
    return OperatorTarget(
        f"_moe_C::topk_{scores}",
        (*_TAKEN, *further),
        Route(
            args={
                "topk": lambda topk_weights: topk_weights.shape[-1],
                "e_score_correction_bias": "bias",
            },
            constants={"scoring_func": scores},
            only=lambda gating_output: gating_output.ndim == 2,
            out=("topk_weights", "topk_indices"),
            results=_marked if pads else None,
            own_args={"token_expert_indices": _rows, "is_padding": lambda: None},
        ),
        tokens="gating_output",
    )


BINDING = Binding(
    targets=(
        # The second of each pair is for vLLM 0.26, without `is_padding`.
        _operator("softmax", "is_padding"),
        _operator("softmax"),
        _operator("sigmoid", "routed_scaling_factor", "is_padding"),
        _operator("sigmoid", "routed_scaling_factor"),
        # The CPU build, since the first release with this module.
        FunctionTarget(
            ("vllm.model_executor.layers.fused_moe.router.cpu_router._softmax_topk",),
            ("router_logits", "top_k", "renormalize"),
            Route(args={"gating_output": "router_logits", "topk": "top_k"}),
            tokens="router_logits",
        ),
    ),
    sizes=(EXPERT_COUNT, EXPERTS_OF_A_TOKEN),
    not_reached=(
        "experts with a kernel that also routes (FlashInfer's monolithic TensorRT-LLM experts)",
        "scores other than softmax and sigmoid (DeepSeek V4), a model's own routing function, and "
        "AITER's routing on ROCm",
        "vLLM's CPU build: compiled models, where routing is part of the graph, and releases "
        "without their own router",
    ),
    when=has_experts,
    formerly=("fused_topk_bias", "topk_softmax"),
)
