"""Where vLLM runs `merge_attn_states`: attention over a prefix that was computed apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.binding import Binding, Bound, FunctionPlace, OperatorPlace, put
from vllm_fl.contracts.sizes import HEAD_SIZE, HEADS

from ._latent import VALUE_SIZE
from ._models import has_paged_attention

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]


def _into(op: Bound) -> Bound:
    """vLLM's functions, over the op. They have heads before tokens in log-sum-exps."""

    def function(
        output: Tensor,
        prefix_output: Tensor,
        prefix_lse: Tensor,
        suffix_output: Tensor,
        suffix_lse: Tensor,
        output_lse: Tensor | None = None,
        prefill_tokens_with_context: int | None = None,
        output_scale: Tensor | None = None,
    ) -> Any:
        tokens, context = output.shape[0], prefill_tokens_with_context
        if output_scale is not None or output.dtype != prefix_output.dtype:
            return NotImplemented  # the result is quantised, too
        if context is not None and context != tokens:
            return NotImplemented  # the other tokens are copied
        if not prefix_lse.shape[1] == suffix_lse.shape[1] == prefix_output.shape[0] == tokens:
            return NotImplemented  # padded
        merged, lse = op(prefix_output, prefix_lse.T, suffix_output, suffix_lse.T)
        put((output, None if output_lse is None else output_lse.T), (merged, lse))
        return None

    return function


def _from(replaced: Bound) -> Bound:
    def merge_attn_states(
        prefix_output: Tensor, prefix_lse: Tensor, suffix_output: Tensor, suffix_lse: Tensor
    ) -> tuple[Tensor, Tensor]:
        # The kernels read both outputs by the strides of one; vLLM 0.26's read sums without any.
        prefix_output, suffix_output = prefix_output.contiguous(), suffix_output.contiguous()
        prefix_sums, suffix_sums = prefix_lse.T.contiguous(), suffix_lse.T.contiguous()
        output = prefix_output.new_empty(prefix_output.shape)
        sums = prefix_sums.new_empty(prefix_sums.shape)
        replaced(output, prefix_output, prefix_sums, suffix_output, suffix_sums, sums)
        return output, sums.T

    return merge_attn_states


def _into_operator(op: Bound) -> Bound:
    """The operator has its second result beside the first."""
    function = _into(op)

    def kernel(
        output: Tensor,
        output_lse: Tensor | None,
        prefix_output: Tensor,
        prefix_lse: Tensor,
        suffix_output: Tensor,
        suffix_lse: Tensor,
        prefill_tokens_with_context: int | None = None,
        output_scale: Tensor | None = None,
    ) -> Any:
        return function(
            output,
            prefix_output,
            prefix_lse,
            suffix_output,
            suffix_lse,
            output_lse,
            prefill_tokens_with_context,
            output_scale,
        )

    return kernel


def _from_operator(replaced: Bound) -> Bound:
    def function(
        output: Tensor,
        prefix_output: Tensor,
        prefix_lse: Tensor,
        suffix_output: Tensor,
        suffix_lse: Tensor,
        output_lse: Tensor,
    ) -> None:
        args = (prefix_output, prefix_lse, suffix_output, suffix_lse)
        replaced(output, output_lse, *args, None, None)

    return _from(function)


_OPS = "vllm.v1.attention.ops"

FUNCTION = (
    "output",
    "prefix_output",
    "prefix_lse",
    "suffix_output",
    "suffix_lse",
    "output_lse",
    "prefill_tokens_with_context",
    "output_scale",
)

BINDING = Binding(
    places=(
        OperatorPlace(
            "_C::merge_attn_states",
            (
                "output",
                "output_lse",
                "prefix_output",
                "prefix_lse",
                "suffix_output",
                "suffix_lse",
                "prefill_tokens_with_context",
                "output_scale",
            ),
            _into_operator,
            _from_operator,
            tokens="prefix_output",
        ),
        # What `merge_attn_states` calls where that operator does not serve: Triton, or PyTorch.
        *(
            FunctionPlace((path,), FUNCTION, _into, _from, tokens="prefix_output")
            for path in (
                f"{_OPS}.triton_merge_attn_states.merge_attn_states",
                f"{_OPS}.merge_attn_states._merge_attn_states_torch",
            )
        ),
    ),
    sizes=(HEADS, HEAD_SIZE, VALUE_SIZE),
    not_reached=(
        "results in fp8 (`output_scale`), and batches of which some tokens have no prefix "
        "(`prefill_tokens_with_context`): vLLM's own kernel takes these calls",
        "merging inside a kernel: cascade attention of FlashInfer, attention that splits its keys",
        "attention backends of plugins",
    ),
    # Latent attention merges the pieces of a prompt on CPUs, too.
    when=lambda config: config.model_config.use_mla or has_paged_attention(config),
    between_graphs=True,
)
