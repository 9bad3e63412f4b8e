"""Ids that only one distribution may use, and distributions with a special role."""

from __future__ import annotations

from collections.abc import Iterable

from ..contracts import OPS
from .installed import canonical
from .plugin import Owner, Plugin

RESERVED = {
    "reference.": "vllm-fl-reference",
    "default.flagos": "vllm-fl-flaggems",
    "stock.": None,
}
"""Ids, or what they begin with, and the one distribution that may use them; None: nobody."""

VERIFY, TOOLS = "vllm-fl-verify", "vllm-fl-tools"
EXTENDERS = frozenset((VERIFY, TOOLS))
"""The distributions that may have extensions."""


def reservation(impl_id: str, owner: Owner) -> str:
    """Why `owner` may not use this id; empty when it may.

    What has no distribution (a script, a module that the user named) is held to `stock.` alone.
    """
    for reserved, holder in RESERVED.items():
        is_prefix = reserved.endswith(".")
        given = impl_id.lower()
        if not (given.startswith(reserved) if is_prefix else given == reserved):
            continue
        ids = f"ids that begin with {reserved!r}" if is_prefix else f"the id {reserved!r}"
        if holder is None:
            return f"{ids} mean vLLM's own path and are nobody's to use"
        if owner.distribution is not None and canonical(owner.distribution) != holder:
            return f"{ids} {'are' if is_prefix else 'is'} {holder}'s to use"
    return ""


def brings_ops(owner: Owner) -> bool:
    """Whether it is the distribution whose ops these are."""
    return owner.distribution is not None and canonical(owner.distribution) == OPS


def may_extend(distribution: str | None) -> bool:
    """Whether a distribution may have extensions."""
    return distribution is not None and canonical(distribution) in EXTENDERS


def ops_missing(plugins: Iterable[Plugin]) -> str:
    """Why `OPS` is not loaded, and what to do; empty if it is loaded."""
    for plugin in plugins:
        if brings_ops(plugin.owner):
            if plugin.status == "disabled":
                return f"VLLM_FL_PLUGINS leaves out {OPS}"
            return f"{OPS} failed to load: see `vllm-fl doctor`" if plugin.status != "ok" else ""
    return f"{OPS} is not installed: pip install {OPS}"
