"""Kept for plugins that import from here: `vllm_fl` has `hookimpl` and `HOOK_API`."""

from .plugins.hookspecs import *  # noqa: F403
