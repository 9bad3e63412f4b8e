"""Whether anything here verifies kernels: an engine does not serve unverified ones unasked."""

from __future__ import annotations

from collections.abc import Iterable

from .installed import CORE, canonical
from .plugin import Plugin
from .reserved import VERIFY

OFF = "set VLLM_FL_PREFLIGHT=off"


def unverified(preflight: str, plugins: Iterable[Plugin], *, plans_others: bool) -> str | None:
    """Why an engine must not start: its kernels should be verified and cannot be. None if it may.

    Args:
        preflight: the value of VLLM_FL_PREFLIGHT.
        plugins: the plugins that were found, those that failed to load included.
        plans_others: whether the plan has implementations that are not vLLM's own.
    """
    if preflight == "off" or not plans_others:
        return None
    plugins = [*plugins]
    for plugin in plugins:
        if plugin.error is not None and plugin.status == "failed" and _is_verifier(plugin):
            return f"nothing here verifies kernels: {plugin.error.message} Or {OFF}"
    if any(plugin.verifies for plugin in plugins):
        return None
    return f"nothing here verifies kernels: pip install {VERIFY}, or {OFF}"


def _is_verifier(plugin: Plugin) -> bool:
    """Whether a plugin that failed would verify. One that was not imported cannot declare it."""
    owner = canonical(plugin.owner.distribution or "")
    return plugin.verifies or (plugin.kind == "extension" and owner in (CORE, VERIFY))
