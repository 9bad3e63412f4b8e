"""Where vLLM runs `moe_sum`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.contracts.binding import Binding, Bound, OperatorPlace, put
from vllm_fl.contracts.sizes import HIDDEN

from ._experts import EXPERTS_OF_A_TOKEN
from ._models import has_experts

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]


def _into(op: Bound) -> Bound:
    def kernel(
        input: Tensor,
        output: Tensor,
        topk_ids: Tensor | None = None,
        expert_map: Tensor | None = None,
    ) -> object:
        if input.ndim != 3 or output.shape != (input.shape[0], input.shape[2]):
            return NotImplemented
        # vLLM's kernel looks at the map for the sake of ids alone.
        put(output, op(input, topk_ids, None if topk_ids is None else expert_map))
        return None

    return kernel


def _from(replaced: Bound) -> Bound:
    def op(
        input: Tensor, topk_ids: Tensor | None = None, expert_map: Tensor | None = None
    ) -> Tensor:
        output = input.new_empty((input.shape[0], input.shape[2]))
        replaced(input, output, topk_ids, expert_map)
        return output

    return op


BINDING = Binding(
    places=(
        OperatorPlace(
            "_moe_C::moe_sum",
            ("input", "output", "topk_ids", "expert_map"),
            _into,
            _from,
            tokens="input",
        ),
    ),
    sizes=(HIDDEN, EXPERTS_OF_A_TOKEN),
    not_reached=(
        "experts whose kernel adds up, too (FlashInfer's, batched ones, vLLM's CPU build's)",
        "experts that weigh and add in one Triton kernel (`moe_fused_mul_sum`)",
    ),
    when=has_experts,
)
