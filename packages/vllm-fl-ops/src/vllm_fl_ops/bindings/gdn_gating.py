"""Binding of `gdn_gating`: called before the chunked delta rule in vLLM's CPU build."""

from __future__ import annotations

from vllm_fl.contracts.binding import Binding, OperatorTarget, Route

from ._hybrid import LINEAR_VALUE_HEADS, has_states

BINDING = Binding(
    targets=(
        OperatorTarget(
            "_C::fused_gdn_gating_cpu",
            ("A_log", "a", "b", "dt_bias"),
            Route(  # the operator's results have a dimension of 1 before the tokens
                results=lambda gates: tuple(gate[None] for gate in gates),
                own_results=lambda gates: tuple(gate[0] for gate in gates),
            ),
            tokens="a",
        ),
    ),
    sizes=(LINEAR_VALUE_HEADS,),
    not_reached=(
        "accelerators: vLLM's kernels before the chunked rule (`fused_post_conv_prep`) and of the "
        "recurrent rule also compute the gates",
        "Kimi's delta attention, which has gates per feature: another op",
    ),
    when=has_states,
    between_graphs=True,
    formerly=("fused_gdn_gating",),
)
