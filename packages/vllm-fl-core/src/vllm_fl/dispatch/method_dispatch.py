"""Kept for layers that import from here. `vllm_fl.dispatch` has `dispatch_method`."""

from . import *  # noqa: F403
