"""This module is kept for programs that import it. `vllm_fl.dispatch` has these names."""

from ..settings.policy import *  # noqa: F403
from . import *  # noqa: F403
