"""Where vLLM runs `moe_topk`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.contracts.binding import Binding, Bound, FunctionPlace, OperatorPlace, put

from ._experts import EXPERT_COUNT, EXPERTS_OF_A_TOKEN
from ._models import has_experts

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]

_COMMON = (
    "topk_weights",
    "topk_indices",
    "token_expert_indices",
    "gating_output",
    "renormalize",
    "bias",
)


def _softmax(op: Bound) -> Bound:
    def kernel(
        topk_weights: Tensor,
        topk_indices: Tensor,
        token_expert_indices: Tensor,
        gating_output: Tensor,
        renormalize: bool,
        bias: Tensor | None,
        is_padding: Tensor | None = None,
    ) -> object:
        if gating_output.ndim != 2:
            return NotImplemented
        topk = topk_weights.shape[-1]
        routing = op(gating_output, topk, renormalize, "softmax", 1.0, bias)
        _leave(routing, topk_weights, topk_indices, is_padding)
        return None

    return kernel


def _sigmoid(op: Bound) -> Bound:
    def kernel(
        topk_weights: Tensor,
        topk_indices: Tensor,
        token_expert_indices: Tensor,
        gating_output: Tensor,
        renormalize: bool,
        bias: Tensor | None,
        routed_scaling_factor: float,
        is_padding: Tensor | None = None,
    ) -> object:
        if gating_output.ndim != 2:
            return NotImplemented
        topk = topk_weights.shape[-1]
        routing = op(gating_output, topk, renormalize, "sigmoid", routed_scaling_factor, bias)
        _leave(routing, topk_weights, topk_indices, is_padding)
        return None

    return kernel


def _leave(
    routing: tuple[Tensor, Tensor],
    topk_weights: Tensor,
    topk_indices: Tensor,
    is_padding: Tensor | None,
) -> None:
    """Put weights and ids where vLLM's kernels do; tokens of padding have no expert there.

    `token_expert_indices` stay as they were: no release that we support reads them.
    """
    weights, ids = routing
    if is_padding is not None:
        ids = ids.masked_fill(is_padding.unsqueeze(-1), -1)
    put((topk_weights, topk_indices), (weights, ids))


def _by_operator(replaced: Bound, scales: bool, pads: bool) -> Bound:
    """The op by an operator that applies the factor if it `scales`, and knows padding if it `pads`.

    Which operator it is says how it scores.
    """

    def op(
        gating_output: Tensor,
        topk: int,
        renormalize: bool,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0,
        e_score_correction_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        from torch import float32, int32

        shape = (gating_output.shape[0], topk)
        weights = gating_output.new_empty(shape, dtype=float32)
        ids, rows = (gating_output.new_empty(shape, dtype=int32) for _ in range(2))
        factor = (routed_scaling_factor,) if scales else ()
        padding = (None,) if pads else ()
        bias = e_score_correction_bias
        replaced(weights, ids, rows, gating_output, renormalize, bias, *factor, *padding)
        return weights, ids

    return op


def _cpu(op: Bound) -> Bound:
    def softmax_topk(router_logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        routing: tuple[Tensor, Tensor] = op(router_logits, top_k, renormalize)
        return routing

    return softmax_topk


def _by_cpu(replaced: Bound) -> Bound:
    def op(
        gating_output: Tensor,
        topk: int,
        renormalize: bool,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0,
        e_score_correction_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        routing: tuple[Tensor, Tensor] = replaced(gating_output, topk, renormalize)
        return routing

    return op


BINDING = Binding(
    places=(
        OperatorPlace(
            "_moe_C::topk_softmax",
            (*_COMMON, "is_padding"),
            _softmax,
            lambda replaced: _by_operator(replaced, scales=False, pads=True),
            tokens="gating_output",
        ),
        # vLLM 0.26, whose operators know no padding.
        OperatorPlace(
            "_moe_C::topk_softmax",
            _COMMON,
            _softmax,
            lambda replaced: _by_operator(replaced, scales=False, pads=False),
            tokens="gating_output",
        ),
        OperatorPlace(
            "_moe_C::topk_sigmoid",
            (*_COMMON, "routed_scaling_factor", "is_padding"),
            _sigmoid,
            lambda replaced: _by_operator(replaced, scales=True, pads=True),
            tokens="gating_output",
        ),
        OperatorPlace(
            "_moe_C::topk_sigmoid",
            (*_COMMON, "routed_scaling_factor"),
            _sigmoid,
            lambda replaced: _by_operator(replaced, scales=True, pads=False),
            tokens="gating_output",
        ),
        # The CPU build, from the release that has this module on.
        FunctionPlace(
            ("vllm.model_executor.layers.fused_moe.router.cpu_router._softmax_topk",),
            ("router_logits", "top_k", "renormalize"),
            _cpu,
            _by_cpu,
            tokens="router_logits",
        ),
    ),
    sizes=(EXPERT_COUNT, EXPERTS_OF_A_TOKEN),
    not_reached=(
        "experts whose kernel routes, too (monolithic ones: FlashInfer's of TensorRT-LLM)",
        "other scores than softmax and sigmoid (DeepSeek V4's), a model's own routing function, "
        "and AITER's routing on ROCm",
        "vLLM's CPU build where it compiles the model, since its routing is part of the graph, and "
        "before it had a router of its own",
    ),
    when=has_experts,
    formerly=("fused_topk_bias", "topk_softmax"),
)
