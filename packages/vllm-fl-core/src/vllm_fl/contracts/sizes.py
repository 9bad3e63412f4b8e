"""The sizes of a served model on one rank, as far as its configuration has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from .binding import Binding, SizeRule
from .spec import ModelSizes

__all__ = ["by_name", "model_sizes", "with_values"]

LONGEST = 2**18
"""Positions of a made table at most: 128 MiB in float32, of 128 features. vLLM takes any length
under VLLM_ALLOW_LONG_MAX_MODEL_LEN, and each sample has a table of its own."""


def model_sizes(config: Any, bindings: Iterable[Binding]) -> ModelSizes:
    """The served model's sizes, by the rules of the ops' bindings.

    Args:
        config: vLLM's VllmConfig.
        bindings: those of every op. Rules of one name are one: the first is asked.
    """
    rules = by_name(rule for binding in bindings for rule in binding.sizes)
    return replace(
        with_values({name: _size(rule, config) for name, rule in rules.items()}),
        tokens=(1, int(config.scheduler_config.max_num_batched_tokens)),
        max_position=min(int(config.model_config.max_model_len), LONGEST),
    )


def by_name(rules: Iterable[SizeRule]) -> dict[str, SizeRule]:
    """The rules by their names. Those of one name are one, the first."""
    found: dict[str, SizeRule] = {}
    for rule in rules:
        found.setdefault(rule.name, rule)
    return found


def with_values(values: Mapping[str, float | None]) -> ModelSizes:
    """Sizes of these values: those that `ModelSizes` has no field for are its `more`."""
    own = {field.name for field in fields(ModelSizes)} - {"tokens", "max_position", "more"}
    known: dict[str, Any] = {n: v for n, v in values.items() if n in own and v is not None}
    return ModelSizes(**known, more={n: v for n, v in values.items() if n not in own})


def _size(rule: SizeRule, config: Any) -> float | None:
    try:
        return rule.ask(config)
    except Exception:  # configurations are the models' own, and anything may be missing
        return None
