"""One installed plugin: who brought it, and what became of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..contracts.binding import Binding, Contract
from ..errors import PluginError
from ..text import clean
from .installed import canonical
from .types import SettingSpec

Status = Literal["ok", "partial", "failed", "disabled"]

Kind = Literal["backend", "contracts", "extension"]
"""The purpose of a plugin, by the group of its entry point."""


@dataclass(frozen=True)
class Owner:
    """Who brought an implementation.

    Args:
        plugin: the entry point's name, or the module's.
        distribution: the installed distribution, or None for a module that is none.
        version: its version, or None.
        path: where its module lies.
        kernels: the distributions whose code its implementations run beside its own.
    """

    plugin: str
    distribution: str | None = None
    version: str | None = None
    path: str | None = None
    kernels: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """`vllm-fl-cpu 0.1.0`, or the plugin's name where it has no distribution."""
        return self.release or self.plugin

    @property
    def release(self) -> str | None:
        """`vllm-fl-cuda 0.1.0`; None where it has no distribution. Errors carry it."""
        return f"{self.distribution} {self.version}" if self.distribution else None

    @property
    def label(self) -> str:
        """The distribution's name, or the plugin's where it has none."""
        return self.distribution or self.plugin

    def is_of(self, *names: str | None) -> bool:
        """Whether its distribution is one of these, as pip compares names."""
        return self.distribution is not None and canonical(self.distribution) in names

    @property
    def who(self) -> str:
        """`Plugin 'cuda' of vllm-fl-cuda 0.1.0 (/path)`, cleaned: what errors begin with."""
        return f"Plugin {clean(self.plugin)!r} of {clean(str(self))}"

    def error(
        self, message: str, *, kind: type[PluginError] = PluginError, **facts: Any
    ) -> PluginError:
        """An error for which this plugin is to blame. What it says begins with `who`.

        Args:
            message: the rest of it.
            kind: its class.
            facts: its other fields.
        """
        told = f"{self.who}{message}"
        return kind(told, plugin=self.plugin, distribution=self.release, **facts)

    def __str__(self) -> str:
        return f"{self.name} ({self.path})" if self.path else self.name


@dataclass(frozen=True)
class Plugin:
    """One installed plugin and what became of it.

    Args:
        owner: its entry point's name, distribution, version and path.
        target: what the entry point points at (`acme.plugin`).
        status: `ok`, `partial` (ids that are not its own were refused, the rest is loaded),
            `failed`, or `disabled` (VLLM_FL_PLUGINS leaves it out).
        hooks: the hooks that it implements, each as a function that returns a list of results;
            `register_builtins` is the older form.
        error: why it failed, or what was refused.
        lost: the (op, id)s that were not loaded.
        settings: the settings that it declares.
        contracts: the ops that it brings, each with its targets in vLLM.
        kind: its purpose. A plugin of kind `contracts` has only contracts. An `extension` belongs
            to this project, provides no implementations, and is loaded regardless of
            VLLM_FL_PLUGINS.
        verifies: whether it is a verifier: its module declares `VERIFIES = True`.
    """

    owner: Owner
    target: str
    status: Status
    hooks: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    error: PluginError | None = None
    lost: tuple[tuple[str, str], ...] = ()
    settings: tuple[SettingSpec[Any], ...] = ()
    contracts: tuple[tuple[Contract, Binding], ...] = ()
    kind: Kind = "backend"
    verifies: bool = False

    @property
    def is_loaded(self) -> bool:
        """Whether its hooks may be called."""
        return self.status in ("ok", "partial")

    @property
    def lost_contracts(self) -> bool:
        """Whether it has failed and may have had contracts: nobody knows of which ops."""
        return self.status == "failed" and (not self.hooks or "contracts" in self.hooks)

    def may_bring(self, name: str, op: str | None = None) -> bool:
        """Whether an impl id or vendor called `name` would have come from this plugin, for `op`."""
        vendor = name.removeprefix("vendor.")
        if any(i in (name, f"vendor.{vendor}") and op in (None, of) for of, i in self.lost):
            return True
        words = re.split(r"[-_.]", f"{self.owner.plugin}-{self.owner.distribution or ''}")
        return self.status == "failed" and vendor in words
