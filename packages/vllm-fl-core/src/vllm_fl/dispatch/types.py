"""Kept for plugins that import from here: everything is in `vllm_fl` now."""

from ..plugins.types import *  # noqa: F403
from . import *  # noqa: F403
