"""Reserved ids, and the distributions of this project that an engine needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .plugin import Owner, Plugin

RESERVED = {
    "reference.": "vllm-fl-reference",
    "default.flagos": "vllm-fl-flaggems",
    "stock.": None,
    "vllm.": None,
}
"""Reserved id, or prefix of ids -> the only distribution that may use it, or None."""

FL_OPS, VERIFY, TOOLS = "vllm-fl-ops", "vllm-fl-verify", "vllm-fl-tools"
EXTENDERS = frozenset((VERIFY, TOOLS))
"""The distributions that may provide extensions."""

READ_BY = {
    **dict.fromkeys(("lock", "metrics", "keep_faults"), ("operate", TOOLS)),
    "shadow": ("verify", VERIFY),
}
"""Setting -> the only extension that reads it, and its distribution."""

OFF = "set VLLM_FL_PREFLIGHT=off"


def holder_of(impl_id: str) -> str | None:
    return RESERVED.get(_reserved(impl_id))


def reservation(impl_id: str, owner: Owner) -> str:
    """Return why `owner` may not use this id; empty if it may. An owner without a distribution (a
    script, a user's module) may use all ids except `stock.` and `vllm.`."""
    reserved = _reserved(impl_id)
    is_prefix = reserved.endswith(".")
    ids = f"ids that begin with {reserved!r}" if is_prefix else f"the id {reserved!r}"
    if reserved in ("stock.", "vllm."):
        return f"{ids} are reserved for vLLM's implementation"
    if not reserved or owner.distribution is None or owner.is_of(RESERVED[reserved]):
        return ""
    return f"{ids} {'are' if is_prefix else 'is'} reserved for {RESERVED[reserved]}"


def _reserved(impl_id: str) -> str:
    given = impl_id.lower()
    found = (r for r in RESERVED if given == r or (r.endswith(".") and given.startswith(r)))
    return next(found, "")


def ops_missing(plugins: Iterable[Plugin]) -> str:
    """Return why `FL_OPS` is not loaded, and what to do; empty if it is loaded."""
    for plugin in plugins:
        if plugin.owner.is_of(FL_OPS):
            if plugin.status == "disabled":
                return f"VLLM_FL_PLUGINS does not contain {FL_OPS}"
            return f"{FL_OPS} failed to load: see `vllm-fl doctor`" if plugin.status != "ok" else ""
    return f"{FL_OPS} is not installed: pip install {FL_OPS}"


def unverified(preflight: str, plugins: Iterable[Plugin], *, plans_others: bool) -> str | None:
    """Return why an engine must not start if no plugin can verify its kernels, or None. `plugins`
    includes failed ones. `plans_others` is whether the plan has implementations other than
    `stock`."""
    if preflight == "off" or not plans_others:
        return None
    plugins = [*plugins]
    for plugin in plugins:
        if plugin.error is not None and _is_verifier(plugin):
            return f"no loaded plugin verifies kernels: {plugin.error.message} Or {OFF}"
    if any(plugin.verifies and plugin.is_loaded for plugin in plugins):
        return None
    return f"no loaded plugin verifies kernels: pip install {VERIFY}, or {OFF}"


def unread(settings: Mapping[str, object], plugins: Iterable[Plugin]) -> str | None:
    """Return why an engine must not start if no extension reads a setting that is set, or None."""
    loaded = {p.owner.plugin for p in plugins if p.kind == "extension" and p.is_loaded}
    for key, (extension, distribution) in READ_BY.items():
        if settings.get(key) is not None and extension not in loaded:
            variable = f"VLLM_FL_{key.upper()}"
            return f"no loaded plugin reads {variable}: pip install {distribution}, or unset it"
    return None


def _is_verifier(plugin: Plugin) -> bool:
    """Whether a plugin is a verifier. It may have failed before its VERIFIES was read."""
    return plugin.verifies or (plugin.kind == "extension" and plugin.owner.is_of(VERIFY))
