"""The sizes of a served model on one rank, as far as its configuration tells them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from ..logs import get_logger
from .binding import Binding, SizeRule
from .spec import ModelSizes

__all__ = ["by_name", "model_sizes", "with_values"]

log = get_logger("engine")

_logged: set[str] = set()
"""The sizes that were named in the log: a configuration is asked many times while it is made."""

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
    untold: list[str] = []
    values = {name: _asked(rule, config, untold) for name, rule in rules.items()}
    if new := [name for name in untold if name not in _logged]:
        log.debug("the model's configuration does not tell %s", ", ".join(new))
        _logged.update(new)
    return replace(
        with_values(values),
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
    told: dict[str, Any] = {n: v for n, v in values.items() if n in own and v is not None}
    return ModelSizes(**told, more={n: v for n, v in values.items() if n not in own})


def _asked(rule: SizeRule, config: Any, untold: list[str]) -> float | None:
    try:
        return rule.ask(config)
    except Exception:  # configurations are the models' own, and anything may lack
        untold.append(rule.name)
        return None
