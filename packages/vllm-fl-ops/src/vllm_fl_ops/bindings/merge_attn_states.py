"""Binding of `merge_attn_states`: attention over a prefix that is computed separately."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.contracts.binding import Binding, FunctionTarget, OperatorTarget, Route

from ..contracts.rules import HEAD_SIZE, HEADS
from ._latent import VALUE_SIZE
from ._models import has_paged_attention
from ._phrases import names

if TYPE_CHECKING:
    from torch import Tensor


def _is_plain(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_lse: Tensor,
    prefill_tokens_with_context: int | None,
) -> bool:
    """Return whether all tokens merge, without quantised outputs or padded log-sum-exps."""
    tokens = output.shape[0]
    return (
        output.dtype == prefix_output.dtype
        and prefill_tokens_with_context in (None, tokens)
        and prefix_lse.shape[1] == suffix_lse.shape[1] == prefix_output.shape[0] == tokens
    )


def _heads_first(results: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The results in vLLM's layout: log-sum-exps have heads before tokens."""
    output, sums = results
    return output, sums.T


ROUTE = Route(
    args={
        "prefix_lse": lambda prefix_lse: prefix_lse.T,
        "suffix_lse": lambda suffix_lse: suffix_lse.T,
    },
    constants={"output_scale": None},
    only=_is_plain,
    out=("output", "output_lse"),
    results=_heads_first,
    # The kernels use one output's strides for both. vLLM 0.26's kernels ignore the strides of sums.
    own_args={
        "prefix_output": lambda prefix_output: prefix_output.contiguous(),
        "suffix_output": lambda suffix_output: suffix_output.contiguous(),
        "prefix_lse": lambda prefix_lse: prefix_lse.T.contiguous(),
        "suffix_lse": lambda suffix_lse: suffix_lse.T.contiguous(),
        "output_lse": lambda prefix_lse: prefix_lse.new_empty(prefix_lse.T.shape),
        "prefill_tokens_with_context": lambda: None,
    },
    own_results=_heads_first,
)

_OPS = "vllm.v1.attention.ops"

FUNCTION = names(
    "output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse, "
    "prefill_tokens_with_context, output_scale"
)

BINDING = Binding(
    targets=(
        OperatorTarget(
            "_C::merge_attn_states",
            names(
                "output, output_lse, prefix_output, prefix_lse, suffix_output, suffix_lse, "
                "prefill_tokens_with_context, output_scale"
            ),
            ROUTE,
            tokens="prefix_output",
        ),
        # Called by `merge_attn_states` if it cannot use that operator: Triton, or PyTorch.
        *(
            FunctionTarget((path,), FUNCTION, ROUTE, tokens="prefix_output")
            for path in (
                f"{_OPS}.triton_merge_attn_states.merge_attn_states",
                f"{_OPS}.merge_attn_states._merge_attn_states_torch",
            )
        ),
    ),
    sizes=(HEADS, HEAD_SIZE, VALUE_SIZE),
    not_reached=(
        "results in fp8 (`output_scale`), and batches where some tokens have no prefix "
        "(`prefill_tokens_with_context`): vLLM's kernel runs these calls",
        "merging inside a kernel: FlashInfer's cascade attention, attention that splits its keys",
        "attention backends of plugins",
    ),
    # Latent attention also merges the chunks of a prompt on CPUs.
    when=lambda config: config.model_config.use_mla or has_paged_attention(config),
    between_graphs=True,
)
