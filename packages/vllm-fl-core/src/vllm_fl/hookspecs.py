"""This module is kept for plugins that import it. `hookimpl` and `HOOK_API` are now in
`vllm_fl`."""

from .plugins.hookspecs import HOOK_API, hookimpl

__all__ = ["HOOK_API", "hookimpl"]
