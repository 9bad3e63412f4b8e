"""Conditions on a served model, for a binding's `when`. Each takes vLLM's VllmConfig."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


def has_experts(config: Any) -> bool:
    return bool(config.model_config.get_num_experts())


def has_paged_attention(config: Any) -> bool:
    """Return whether attention uses vLLM's cache functions for GPUs. CPUs have other operators."""
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()


def is_multimodal(config: Any) -> bool:
    """Return whether the model takes images or sound. Configurations often omit the activations of
    its encoders.
    """
    return bool(config.model_config.is_multimodal_model)


def mentions(word: str, *, or_multimodal: bool = False) -> Callable[[Any], bool]:
    """Return a function that checks a model for a setting with `word` in its name or value.

    Activations have many such names: `hidden_act`, `activation_function`, `projector_hidden_act`.

    Args:
        word: in lower case.
        or_multimodal: whether any multimodal model meets the condition.
    """

    def when(config: Any) -> bool:
        if or_multimodal and is_multimodal(config):
            return True
        return any(word in text for text in _texts(config.model_config.hf_config.to_dict()))

    return when


def _texts(value: Any) -> Iterator[str]:
    """Yield every name and every string in a configuration, including nested ones."""
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
    """Return whether the model's weights are quantised, by any scheme.

    Whether and how layers also quantise their activations is decided when they are built.
    """
    return config.model_config.quantization is not None
