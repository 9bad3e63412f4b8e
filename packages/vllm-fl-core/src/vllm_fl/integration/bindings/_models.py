"""What the bindings' `when` asks of a served model. Each takes vLLM's VllmConfig."""

from __future__ import annotations

from typing import Any

__all__ = ["has_experts"]


def has_experts(config: Any) -> bool:
    """Whether the model is a mixture of experts."""
    return bool(config.model_config.get_num_experts())
