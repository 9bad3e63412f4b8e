"""This module is kept for plugins that import it. All names are now in `vllm_fl`."""

from ..plugins.types import *  # noqa: F403
from . import *  # noqa: F403
