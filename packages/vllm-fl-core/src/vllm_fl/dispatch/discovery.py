"""This module is kept for programs that import it. `vllm_fl.dispatch` has these names."""

from . import *  # noqa: F403
