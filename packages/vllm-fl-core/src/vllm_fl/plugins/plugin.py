"""One installed plugin, and what became of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import pluggy

from ..contracts.binding import Binding, Contract
from ..errors import PluginError
from .registry import Owner
from .types import SettingSpec

__all__ = ["Plugin", "Status"]

Status = Literal["ok", "partial", "failed", "disabled"]


@dataclass(frozen=True)
class Plugin:
    """One installed plugin and what became of it.

    Args:
        owner: its entry point's name, distribution, version and path.
        target: what the entry point points at (`acme.plugin`).
        status: `ok`, `partial` (ids that are not its own were refused, the rest is loaded),
            `failed`, or `disabled` (VLLM_FL_PLUGINS leaves it out).
        hooks: the hooks that it implements; `register_builtins` is the older form.
        claims: the impl ids that it brought, or tried to bring.
        error: why it failed, or what was refused.
        manager: its hooks, to be called; None unless it is loaded and has hooks.
        remarks: what it did that is the user's to do and was undone, one sentence each.
        lost: the (op, id)s that were refused to one that is `partial`.
        settings: the settings that it declares.
        contracts: the ops that it brings, each with its places in vLLM.
        is_data: whether it brings contracts and nothing else, by the group of its entry point.
    """

    owner: Owner
    target: str
    status: Status
    hooks: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    error: PluginError | None = None
    manager: pluggy.PluginManager | None = None
    remarks: tuple[str, ...] = ()
    lost: tuple[tuple[str, str], ...] = ()
    settings: tuple[SettingSpec[Any], ...] = ()
    contracts: tuple[tuple[Contract, Binding], ...] = ()
    is_data: bool = False

    @property
    def lost_contracts(self) -> bool:
        """Whether it has failed and may have had contracts: nobody knows of which ops."""
        return self.status == "failed" and (not self.hooks or "contracts" in self.hooks)

    def may_bring(self, name: str, op: str | None = None) -> bool:
        """Whether an impl id or vendor called `name` would have come from this plugin, for `op`."""
        vendor = name.removeprefix("vendor.")
        if self.status == "partial":  # what it brings is known
            ids = (name, f"vendor.{vendor}")
            return any(i in ids and op in (None, of) for of, i in self.lost)
        return name in self.claims or vendor in re.split(
            r"[-_.]", f"{self.owner.plugin}-{self.owner.distribution or ''}"
        )
