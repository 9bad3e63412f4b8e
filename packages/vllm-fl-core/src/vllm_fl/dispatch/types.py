"""Kept for plugins that import from here. All names are now in `vllm_fl`."""

from ..plugins.types import *  # noqa: F403
from . import *  # noqa: F403
