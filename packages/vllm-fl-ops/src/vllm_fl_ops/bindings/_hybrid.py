"""What the bindings of linear attention share: when a model has it, and its sizes."""

from __future__ import annotations

from typing import Any

from vllm_fl.contracts.binding import SizeRule

__all__ = [
    "CONVOLVING",
    "CPU_EPSILON",
    "FLA_EPSILON",
    "LINEAR_VALUE_HEADS",
    "NULL_BLOCK",
    "activation_of",
    "has_states",
]

CONVOLVING = (
    *(
        f"vllm.model_executor.layers.mamba.{name}"
        for name in (
            "gdn.kimi_gdn_linear_attn",
            "gdn.olmo_gdn_linear_attn",
            "gdn.qwen_gdn_linear_attn",
            "mamba_mixer",
            "mamba_mixer2",
            "short_conv",
        )
    ),
    "vllm.model_executor.models.bailing_moe_v3",
    "vllm.models.glm5next.common.kda",
    "vllm.models.kimi_k3.amd.kda",
    "vllm.models.kimi_k3.nvidia.kda",
)
"""The modules that import vLLM's short convolutions by name."""

NULL_BLOCK = 0
"""The block of vLLM's caches that no sequence has."""

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


def activation_of(told: bool | str | None) -> str | None:
    """What the contracts call an activation of vLLM's short convolutions."""
    return "silu" if told in (True, "silu", "swish") else None


LINEAR_VALUE_HEADS = SizeRule(
    "linear_value_heads",
    lambda config: (
        int(config.model_config.hf_text_config.linear_num_value_heads)
        // int(config.parallel_config.tensor_parallel_size)
    ),
    8,
    in_kit=False,
)
