"""What the bindings' `when` asks of a served model. Each takes vLLM's VllmConfig."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["has_experts", "has_paged_attention", "is_multimodal", "is_quantised", "mentions"]


def has_experts(config: Any) -> bool:
    """Whether the model is a mixture of experts."""
    return bool(config.model_config.get_num_experts())


def has_paged_attention(config: Any) -> bool:
    """Whether attention writes and reads caches by the functions of vLLM's GPU backends: on a CPU
    it has operators of its own."""
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()


def is_multimodal(config: Any) -> bool:
    """Whether the model takes images or sound: the encoders' activations are often told nowhere."""
    return bool(config.model_config.is_multimodal_model)


def mentions(word: str, *, or_multimodal: bool = False) -> Callable[[Any], bool]:
    """Whether the model's own configuration has `word` in a setting's name, or in its value.

    Activations have many such names: `hidden_act`, `activation_function`, `projector_hidden_act`.

    Args:
        word: in lower case.
        or_multimodal: whether a multimodal model counts in any case.
    """

    def when(config: Any) -> bool:
        if or_multimodal and is_multimodal(config):
            return True
        return any(word in text for text in _texts(config.model_config.hf_config.to_dict()))

    return when


def _texts(value: Any) -> Iterator[str]:
    """Every name and every word in a configuration, those of the ones inside it included."""
    if isinstance(value, str):
        yield value.lower()
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield str(name).lower()
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def is_quantised(config: Any) -> bool:
    """Whether the model's weights are quantised, by whatever scheme: which of its layers quantise
    their activations, too, and how, is decided where they are built."""
    return config.model_config.quantization is not None
