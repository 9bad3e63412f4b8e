"""Kept for programs that import from here. `vllm_fl.dispatch` has these names."""

from ..settings.policy import *  # noqa: F403
from . import *  # noqa: F403
