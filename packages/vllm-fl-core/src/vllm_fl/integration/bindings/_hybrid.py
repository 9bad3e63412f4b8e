"""What the bindings of linear attention share: when a model has it, and its sizes."""

from __future__ import annotations

from typing import Any

from ...contracts.sizes import SizeRule

__all__ = ["CPU_EPSILON", "FLA_EPSILON", "LINEAR_VALUE_HEADS", "has_states"]

FLA_EPSILON = 1e-6
"""What vLLM's Triton kernels add to the squared length of a head before they divide by its root."""

CPU_EPSILON = 1e-5
"""What the recurrent kernel of its CPU build adds; the chunked one is told."""


def has_states(config: Any) -> bool:
    """Whether a model keeps states beside its KV cache, or instead of one.

    vLLM knows it by the model's class. Which kind of state it is, configurations say in words of
    their own.

    Args:
        config: vLLM's VllmConfig.
    """
    model = config.model_config
    return bool(model.is_hybrid or model.is_attention_free)


LINEAR_VALUE_HEADS = SizeRule(
    "linear_value_heads",
    lambda config: (
        int(config.model_config.hf_text_config.linear_num_value_heads)
        // int(config.parallel_config.tensor_parallel_size)
    ),
    8,
)
