"""`vllm_fl_tools.testing.families`, by the name that backends import."""

from vllm_fl_tools.testing.families import *  # noqa: F403
