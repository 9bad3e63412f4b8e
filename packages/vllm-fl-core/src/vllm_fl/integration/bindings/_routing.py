"""The sizes of a model's routing, as its configuration tells them."""

from __future__ import annotations

from typing import Any

from ...contracts.sizes import SizeRule

__all__ = ["EXPERTS", "EXPERT_GROUPS", "TOPK", "TOPK_GROUPS"]

_EXPERTS = (
    "num_experts",
    "n_routed_experts",
    "num_local_experts",
    "moe_num_experts",
    "num_routed_experts",
)
_TOPK = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
    "moe_experts_per_token",
    "num_selected_experts",
)
_GROUPS = ("n_group", "num_expert_group", "moe_n_group", "num_expert_groups")
_TOPK_GROUPS = ("topk_group", "num_limited_groups", "moe_topk_group")


def _number(config: Any, names: tuple[str, ...]) -> int:
    """The first of these attributes that is told. Models with one per layer give a list.

    Raises:
        AttributeError: none of them is.
    """
    text = config.model_config.hf_text_config
    for name in names:
        value = getattr(text, name, None)
        value = value[0] if isinstance(value, list | tuple) and value else value
        if value:
            return int(value)
    raise AttributeError(f"the configuration has none of {', '.join(names)}")


EXPERTS = SizeRule("experts", lambda config: _number(config, _EXPERTS), 128)
"""All experts of a layer, on whichever rank they are."""

TOPK = SizeRule("experts_per_token", lambda config: _number(config, _TOPK), 8)
"""How many of them a token takes."""

EXPERT_GROUPS = SizeRule("expert_groups", lambda config: _number(config, _GROUPS), 8)
TOPK_GROUPS = SizeRule("topk_groups", lambda config: _number(config, _TOPK_GROUPS), 4)
