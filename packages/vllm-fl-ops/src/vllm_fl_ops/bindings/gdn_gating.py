"""Where vLLM runs `gdn_gating`: before the chunked delta rule of its CPU build."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.contracts.binding import Binding, Bound, OperatorPlace

from ._hybrid import LINEAR_VALUE_HEADS, has_states

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]


def _into(op: Bound) -> Bound:
    def kernel(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        g, beta = op(a, b, A_log, dt_bias)
        return g[None], beta[None]

    return kernel


def _from(replaced: Bound) -> Bound:
    def op(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        g, beta = replaced(A_log, a, b, dt_bias)
        return g[0], beta[0]

    return op


BINDING = Binding(
    places=(
        OperatorPlace(
            "_C::fused_gdn_gating_cpu", ("A_log", "a", "b", "dt_bias"), _into, _from, tokens="a"
        ),
    ),
    sizes=(LINEAR_VALUE_HEADS,),
    not_reached=(
        "accelerators: vLLM's kernels before the chunked rule (`fused_post_conv_prep`) and of the "
        "recurrent one compute the gates, too",
        "Kimi's delta attention, whose gates are per feature: another op",
    ),
    when=has_states,
    between_graphs=True,
    formerly=("fused_gdn_gating",),
)
