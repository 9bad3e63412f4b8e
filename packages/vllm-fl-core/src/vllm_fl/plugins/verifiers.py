"""Check that something verifies the kernels of an engine before it serves."""

from __future__ import annotations

from collections.abc import Iterable

from .installed import CORE, canonical
from .plugin import Plugin
from .reserved import VERIFY

OFF = "set VLLM_FL_PREFLIGHT=off"


def unverified(preflight: str, plugins: Iterable[Plugin], *, plans_others: bool) -> str | None:
    """The reason why an engine must not start: nothing can verify its kernels. None if it may.

    Args:
        preflight: the value of VLLM_FL_PREFLIGHT.
        plugins: all plugins that were found, including plugins that failed to load.
        plans_others: whether the plan has implementations other than `stock`.
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
    """Whether a failed plugin is a verifier, also if its import failed before it declared that."""
    owner = canonical(plugin.owner.distribution or "")
    return plugin.verifies or (plugin.kind == "extension" and owner in (CORE, VERIFY))
