"""Sizes of routing by groups of experts, from a model's configuration."""

from __future__ import annotations

from vllm_fl.contracts.binding import SizeRule

from ._experts import first

_GROUPS = ("n_group", "num_expert_group", "moe_n_group")
_TAKEN = ("topk_group", "num_limited_groups", "moe_topk_group")
"""Configuration names of the number of groups, and of the number of groups per token."""


EXPERT_GROUPS = SizeRule("expert_groups", lambda config: first(config, _GROUPS), 8, in_kit=False)
GROUPS_OF_A_TOKEN = SizeRule(
    "expert_groups_per_token", lambda config: first(config, _TAKEN), 4, in_kit=False
)
