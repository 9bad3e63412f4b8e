"""Kept for plugins that import from here: `vllm_fl` has `hookimpl` and `HOOK_API`."""

from .plugins.hookspecs import HOOK_API, hookimpl

__all__ = ["HOOK_API", "hookimpl"]
