"""This module is kept for layers that import it. `vllm_fl.dispatch` has `dispatch_method`."""

from . import *  # noqa: F403
