"""`vllm_fl_tools.testing.triton`, by the name that backends import."""

from vllm_fl_tools.testing.triton import *  # noqa: F403
