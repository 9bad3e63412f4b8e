"""Sizes of a model's routed experts, from its configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vllm_fl.contracts.binding import SizeRule

from ..contracts.rules import INTERMEDIATE

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TAKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
_WIDTHS = ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size")
_GROUPS = ("n_group", "num_expert_group", "moe_n_group")
_GROUPS_TAKEN = ("topk_group", "num_limited_groups", "moe_topk_group")
"""Configuration names of the number of experts, the number per token, and an expert's width; of the
number of groups of experts, and of the number of groups per token."""


def may_have_experts(config: Any) -> bool:
    """Return whether a setting of the model with "expert" or "moe" in its name has a value."""
    named = _named(config.model_config.hf_config.to_dict())
    return any(("expert" in name or "moe" in name) and value for name, value in named)


def _named(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        yield str(name).lower(), value
        if isinstance(value, Mapping):
            yield from _named(value)


def first(config: Any, names: tuple[str, ...]) -> int:
    """Return the first of these numbers that the configuration has. If it has one per layer, use
    the first layer's.

    Raises:
        StopIteration: the configuration has none of them.
    """
    text = config.model_config.hf_text_config
    value = next(v for name in names if (v := getattr(text, name, None)))
    return int(value[0] if isinstance(value, list | tuple) else value)


def _intermediate(config: Any) -> int:
    """Width of an expert's gate projection on one rank. Expert parallelism does not divide it."""
    parallel = config.parallel_config
    try:
        width = first(config, _WIDTHS)
    except StopIteration:  # Mixtral's experts have the width of an MLP, already divided
        if not parallel.enable_expert_parallel:
            return int(INTERMEDIATE.ask(config))
        return int(INTERMEDIATE.ask(config)) * int(parallel.tensor_parallel_size)
    if parallel.enable_expert_parallel:
        return width
    return max(1, width // int(parallel.tensor_parallel_size))


def _shared(config: Any) -> int:
    """Width of the shared experts' gate projection on one rank; 0 without shared experts."""
    text = config.model_config.hf_text_config
    width = getattr(text, "shared_expert_intermediate_size", None)
    if not width:
        shared = getattr(text, "n_shared_experts", None)
        width = int(shared) * first(config, _WIDTHS) if shared else 0
    return int(width) // int(config.parallel_config.tensor_parallel_size)


EXPERT_COUNT = SizeRule("experts", lambda config: first(config, _COUNTS), 128, few=16, in_kit=False)
EXPERTS_OF_A_TOKEN = SizeRule(
    "experts_per_token", lambda config: first(config, _TAKEN), 8, in_kit=False
)
EXPERT_INTERMEDIATE = SizeRule("expert_intermediate", _intermediate, 768, in_kit=False)
SHARED_INTERMEDIATE = SizeRule("shared_intermediate", _shared, 0, in_kit=False)
EXPERT_GROUPS = SizeRule("expert_groups", lambda config: first(config, _GROUPS), 8, in_kit=False)
GROUPS_OF_A_TOKEN = SizeRule(
    "expert_groups_per_token", lambda config: first(config, _GROUPS_TAKEN), 4, in_kit=False
)
