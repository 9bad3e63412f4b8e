"""Kept for programs that import from here. `vllm_fl.dispatch` has these names."""

from . import *  # noqa: F403
