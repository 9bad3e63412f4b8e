"""Kept for plugins that import from here: `vllm_fl` has `joint_cos_sin`."""

from ...contracts.cos_sin import *  # noqa: F403
