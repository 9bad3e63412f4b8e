"""Kept for plugins that import from here. `vllm_fl.dispatch` has `OpRegistry`."""

from ..plugins.registry import *  # noqa: F403
from . import *  # noqa: F403
