"""Kept for plugins that import from here: `vllm_fl` has `joint_cos_sin`."""

from ...contracts.rotary_embedding import *  # noqa: F403
