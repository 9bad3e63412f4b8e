"""What the bindings' `when` asks of a served model. Each takes vLLM's VllmConfig."""

from __future__ import annotations

from typing import Any

__all__ = ["has_experts", "is_quantised"]


def has_experts(config: Any) -> bool:
    """Whether the model is a mixture of experts."""
    return bool(config.model_config.get_num_experts())


def is_quantised(config: Any) -> bool:
    """Whether the model's weights are quantised, by whatever scheme: which of its layers quantise
    their activations, too, and how, is decided where they are built."""
    return config.model_config.quantization is not None
