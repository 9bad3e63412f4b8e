"""The sizes of a served model on one rank, as far as its configuration tells them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..logs import get_logger
from .binding import Binding, SizeRule
from .spec import ModelSizes

__all__ = [
    "EPSILON",
    "HEADS",
    "HEAD_SIZE",
    "HIDDEN",
    "INTERMEDIATE",
    "KV_HEADS",
    "ROTARY",
    "RULES",
    "first_told",
    "model_sizes",
    "typical_sizes",
]

log = get_logger("engine")

_logged: set[str] = set()
"""The sizes that were named in the log: a configuration is asked many times while it is made."""

_WIDTHS = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", "d_ff")
"""What configurations call the width of the MLP. The last four are older models' names."""

_ROTARY_SHARES = ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction")
_EPSILONS = ("rms_norm_eps", "layernorm_epsilon", "layer_norm_epsilon", "norm_eps")

_HALF_ROTARY = frozenset({"chatglm", "glm4", "glm"})
"""Model types whose code in vLLM turns half of each head, whatever their configuration says."""


def _intermediate(config: Any) -> int:
    """Features of one half of the MLP. Models with one width per layer give a list: the first."""
    value = first_told(config.model_config.hf_text_config, _WIDTHS)
    width = int(value[0] if isinstance(value, list | tuple) else value)
    return max(1, width // int(config.parallel_config.tensor_parallel_size))


def _rotary(config: Any) -> int:
    """How many features of a head rotate, as `vllm.model_executor.layers.rotary_embedding` says."""
    text = config.model_config.hf_text_config
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if not isinstance(parameters, dict):
        parameters = {}
    told = parameters.get("rope_dim") or getattr(text, "rotary_dim", None)
    if told:
        return int(told)
    share = parameters.get("partial_rotary_factor")
    share = share or first_told(text, _ROTARY_SHARES)
    if share is None and getattr(text, "model_type", "") in _HALF_ROTARY:
        share = 0.5
    return max(2, int(config.model_config.get_head_size() * (share or 1.0)))


def first_told(text: Any, names: tuple[str, ...]) -> Any:
    """The first of these attributes that is told."""
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
    "epsilon", lambda c: float(first_told(c.model_config.hf_text_config, _EPSILONS) or 1e-6), 1e-6
)

RULES = (HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_SIZE, ROTARY, EPSILON)
"""The rules behind the fields of `ModelSizes`."""


LONGEST = 2**18
"""Positions of a made table at most: 128 MiB in float32, of 128 features. vLLM takes any length
under VLLM_ALLOW_LONG_MAX_MODEL_LEN, and each sample has a table of its own."""


def model_sizes(config: Any, bindings: Iterable[Binding]) -> ModelSizes:
    """The served model's sizes, by the rules of the ops' bindings.

    Args:
        config: vLLM's VllmConfig.
        bindings: those of every op. Rules of one name are one: the first is asked.
    """
    rules = _by_name(rule for binding in bindings for rule in binding.sizes)
    untold: list[str] = []
    values = {name: _asked(rule, config, untold) for name, rule in rules.items()}
    if new := [name for name in untold if name not in _logged]:
        log.debug("the model's configuration does not tell %s", ", ".join(new))
        _logged.update(new)
    return replace(
        _with_values(values),
        tokens=(1, int(config.scheduler_config.max_num_batched_tokens)),
        max_position=min(int(config.model_config.max_model_len), LONGEST),
    )


def typical_sizes(bindings: Iterable[Binding] = ()) -> ModelSizes:
    """The sizes of no model in particular: each rule's typical one.

    Args:
        bindings: those whose rules of their own count, too.
    """
    rules = _by_name((*RULES, *(rule for binding in bindings for rule in binding.sizes)))
    return _with_values({name: rule.typical for name, rule in rules.items()})


def _by_name(rules: Iterable[SizeRule]) -> dict[str, SizeRule]:
    found: dict[str, SizeRule] = {}
    for rule in rules:
        found.setdefault(rule.name, rule)
    return found


def _with_values(values: Mapping[str, float | None]) -> ModelSizes:
    own = {rule.name for rule in RULES}
    told: dict[str, Any] = {n: v for n, v in values.items() if n in own and v is not None}
    return ModelSizes(**told, more={n: v for n, v in values.items() if n not in own})


def _asked(rule: SizeRule, config: Any, untold: list[str]) -> float | None:
    try:
        return rule.ask(config)
    except Exception:  # configurations are the models' own, and anything may lack
        untold.append(rule.name)
        return None
