"""Ids that only one distribution may use, and distributions with a special role."""

from __future__ import annotations

from collections.abc import Iterable

from .plugin import Owner, Plugin

RESERVED = {
    "reference.": "vllm-fl-reference",
    "default.flagos": "vllm-fl-flaggems",
    "stock.": None,
}
"""Ids, or what they begin with, and the one distribution that may use them; None: nobody."""

OPS, VERIFY, TOOLS = "vllm-fl-ops", "vllm-fl-verify", "vllm-fl-tools"
EXTENDERS = frozenset((VERIFY, TOOLS))
"""The distributions that may have extensions."""


def holder_of(impl_id: str) -> str | None:
    """The only distribution that may use an id; None if there is none."""
    return RESERVED.get(_reserved(impl_id))


def reservation(impl_id: str, owner: Owner) -> str:
    """Why `owner` may not use this id; empty if it may.

    For an owner without a distribution (a script, a module that the user named), only `stock.` is
    reserved.
    """
    reserved = _reserved(impl_id)
    is_prefix = reserved.endswith(".")
    ids = f"ids that begin with {reserved!r}" if is_prefix else f"the id {reserved!r}"
    if reserved == "stock.":
        return f"{ids} mean vLLM's own path and are nobody's to use"
    if not reserved or owner.distribution is None or owner.is_of(RESERVED[reserved]):
        return ""
    return f"{ids} {'are' if is_prefix else 'is'} {RESERVED[reserved]}'s to use"


def _reserved(impl_id: str) -> str:
    given = impl_id.lower()
    found = (r for r in RESERVED if given == r or (r.endswith(".") and given.startswith(r)))
    return next(found, "")


def brings_ops(owner: Owner) -> bool:
    """Whether its distribution has the ops of this project."""
    return owner.is_of(OPS)


def ops_missing(plugins: Iterable[Plugin]) -> str:
    """Why `OPS` is not loaded, and what to do; empty if it is loaded."""
    for plugin in plugins:
        if brings_ops(plugin.owner):
            if plugin.status == "disabled":
                return f"VLLM_FL_PLUGINS leaves out {OPS}"
            return f"{OPS} failed to load: see `vllm-fl doctor`" if plugin.status != "ok" else ""
    return f"{OPS} is not installed: pip install {OPS}"
