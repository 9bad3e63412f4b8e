"""This module is kept for plugins that import it. `vllm_fl.dispatch` has `OpRegistry`."""

from ..plugins.registry import *  # noqa: F403
from . import *  # noqa: F403
