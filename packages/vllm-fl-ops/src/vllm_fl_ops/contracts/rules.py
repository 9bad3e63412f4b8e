"""Rules that read the sizes common to many models from vLLM's configuration, and typical values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm_fl.contracts.binding import Binding, SizeRule, by_name, with_values
from vllm_fl.contracts.spec import ModelSizes

_WIDTHS = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", "d_ff")
"""Configuration names of the MLP's width. The last four are from older models."""

_ROTARY_SHARES = ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction")
_EPSILONS = ("rms_norm_eps", "layernorm_epsilon", "layer_norm_epsilon", "norm_eps")

_HALF_ROTARY = frozenset({"chatglm", "glm4", "glm"})
"""Model types for which vLLM rotates half of each head if no share is configured."""


def _intermediate(config: Any) -> int:
    """Width of the MLP's gate projection on one rank.

    If each layer has its own width, use the first.
    """
    value = first_set(config.model_config.hf_text_config, _WIDTHS)
    width = int(value[0] if isinstance(value, list | tuple) else value)
    return max(1, width // int(config.parallel_config.tensor_parallel_size))


def _rotary(config: Any) -> int:
    """Rotated features of a head, computed like `vllm.model_executor.layers.rotary_embedding`."""
    text = config.model_config.hf_text_config
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if not isinstance(parameters, dict):
        parameters = {}
    size = parameters.get("rope_dim") or getattr(text, "rotary_dim", None)
    if size:
        return int(size)
    share = parameters.get("partial_rotary_factor")
    share = share or first_set(text, _ROTARY_SHARES)
    if share is None and getattr(text, "model_type", "") in _HALF_ROTARY:
        share = 0.5
    return max(2, int(config.model_config.get_head_size() * (share or 1.0)))


def first_set(text: Any, names: tuple[str, ...]) -> Any:
    """The first value that is set among these attributes, or None."""
    return next((v for name in names if (v := getattr(text, name, None)) is not None), None)


HIDDEN = SizeRule("hidden", lambda config: int(config.model_config.get_hidden_size()), 1024)
INTERMEDIATE = SizeRule("intermediate", _intermediate, 3072)
HEADS = SizeRule(
    "heads", lambda c: int(c.model_config.get_num_attention_heads(c.parallel_config)), 16
)
KV_HEADS = SizeRule(
    "kv_heads", lambda c: int(c.model_config.get_num_kv_heads(c.parallel_config)), 8
)
HEAD_SIZE = SizeRule("head_size", lambda config: int(config.model_config.get_head_size()), 128)
ROTARY = SizeRule("rotary", _rotary, 128)
EPSILON = SizeRule(
    "epsilon", lambda c: float(first_set(c.model_config.hf_text_config, _EPSILONS) or 1e-6), 1e-6
)

RULES = (HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_SIZE, ROTARY, EPSILON)
"""The rules for the fields of `ModelSizes`."""


def typical_sizes(bindings: Iterable[Binding] = ()) -> ModelSizes:
    """Return the typical values of all rules, for use without a model.

    Args:
        bindings: bindings that add rules.
    """
    rules = by_name((*RULES, *(rule for binding in bindings for rule in binding.sizes)))
    return with_values({name: rule.typical for name, rule in rules.items()})
