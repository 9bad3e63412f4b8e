"""Check that something verifies the kernels of an engine before it serves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .plugin import Plugin
from .reserved import TOOLS, VERIFY

READ_BY = {
    "operate": (TOOLS, ("lock", "metrics")),
    "verify": (VERIFY, ("shadow",)),
}
"""Extension -> (its distribution, the settings that only it reads)."""

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
    if any(plugin.verifies and plugin.is_loaded for plugin in plugins):
        return None
    return f"nothing here verifies kernels: pip install {VERIFY}, or {OFF}"


def unread(settings: Mapping[str, object], plugins: Iterable[Plugin]) -> str | None:
    """Why an engine must not start: a setting asks for what nothing here does. None if it may.

    Args:
        settings: key -> the value that is set, or None.
        plugins: the plugins that were found.
    """
    loaded = {p.owner.plugin for p in plugins if p.kind == "extension" and p.is_loaded}
    for extension, (distribution, keys) in READ_BY.items():
        for key in keys:
            if settings.get(key) is not None and extension not in loaded:
                variable = f"VLLM_FL_{key.upper()}"
                return f"nothing here reads {variable}: pip install {distribution}, or unset it"
    return None


def _is_verifier(plugin: Plugin) -> bool:
    """Whether a failed plugin is a verifier, also if its import failed before it declared that."""
    return plugin.verifies or (plugin.kind == "extension" and plugin.owner.is_of(VERIFY))
