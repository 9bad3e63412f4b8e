"""Binding of `moe_sum`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.contracts.binding import Binding, OperatorTarget, Route

from ..contracts.rules import HIDDEN
from ._experts import EXPERTS_OF_A_TOKEN
from ._models import has_experts

if TYPE_CHECKING:
    from torch import Tensor


def _adds_experts(input: Tensor, output: Tensor) -> bool:
    return input.ndim == 3 and output.shape == (input.shape[0], input.shape[2])


def _map_of_ids(topk_ids: Tensor | None, expert_map: Tensor | None) -> Tensor | None:
    """The map; None without ids, because vLLM's kernel then ignores the map."""
    return None if topk_ids is None else expert_map


BINDING = Binding(
    targets=(
        OperatorTarget(
            "_moe_C::moe_sum",
            ("input", "output", "topk_ids", "expert_map"),
            Route(args={"expert_map": _map_of_ids}, only=_adds_experts, out="output"),
            tokens="input",
        ),
    ),
    sizes=(HIDDEN, EXPERTS_OF_A_TOKEN),
    not_reached=(
        "experts with a kernel that also adds up (FlashInfer, batched experts, vLLM's CPU build)",
        "experts that multiply and add in one Triton kernel (`moe_fused_mul_sum`)",
    ),
    when=has_experts,
)
