"""Kept for plugins that import from here: they are in `vllm_fl.contracts`."""

from ...contracts import *  # noqa: F403
