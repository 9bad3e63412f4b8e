"""An installed plugin: its owner and its state."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..contracts.binding import Binding, Contract
from ..errors import PluginError
from ..text import clean
from .installed import canonical
from .setting import SettingSpec
from .types import Impl

ONE_OF_TWO = "Uninstall one of the two, or list the ones to load in VLLM_FL_PLUGINS"

Status = Literal["found", "ok", "failed", "disabled"]

Kind = Literal["backend", "contracts", "extension"]
"""The purpose of a plugin. The group of its entry point sets it."""


@dataclass(frozen=True)
class Owner:
    """The origin of an implementation: the entry point or module, the installed distribution (None
    for a bare module), and other distributions (`kernels`) with code that the implementations
    run."""

    plugin: str
    distribution: str | None = None
    version: str | None = None
    path: str | None = None
    kernels: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """`vllm-fl-cpu 0.1.0`, or the plugin's name if it has no distribution."""
        return self.release or self.plugin

    @property
    def release(self) -> str | None:
        """`vllm-fl-cuda 0.1.0`, for errors; None without a distribution."""
        return f"{self.distribution} {self.version}" if self.distribution else None

    @property
    def label(self) -> str:
        """The distribution's name, or the plugin's name if it has no distribution."""
        return self.distribution or self.plugin

    def is_of(self, *names: str | None) -> bool:
        return self.distribution is not None and canonical(self.distribution) in names

    @property
    def who(self) -> str:
        """The prefix of an error: `Plugin 'cuda' of vllm-fl-cuda 0.1.0 (/path)`."""
        return f"Plugin {clean(self.plugin)!r} of {clean(str(self))}"

    def error(
        self, message: str, *, kind: type[PluginError] = PluginError, **facts: Any
    ) -> PluginError:
        text = f"{self.who}{message}"
        return kind(text, plugin=self.plugin, distribution=self.release, **facts)

    def __str__(self) -> str:
        return f"{self.name} ({self.path})" if self.path else self.name


@dataclass(eq=False)
class Plugin:
    """One installed plugin and its state. Only `load` changes it.

    Args:
        target: the value of the entry point (`acme.plugin`).
        kind: `backend`, `contracts` (provides only contracts) or `extension`. An extension belongs
            to this project, provides no implementations, and is always loaded.
        status: `found`, and after loading `ok`, `failed`, or `disabled` (not in VLLM_FL_PLUGINS).
        hooks: the hooks that it implements, each as a function that returns a list of results;
            `register_builtins` is the older form.
        verifies: whether its module declares `VERIFIES = True`.
        contracts: its ops, each with its targets in vLLM.
        todo: how to run without the plugin.
    """

    owner: Owner
    target: str
    load: Callable[[], object] = field(default=lambda: None, repr=False)
    kind: Kind = "backend"
    status: Status = "found"
    error: PluginError | None = None
    hooks: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    verifies: bool = False
    impls: Sequence[Any] = ()
    settings: Sequence[SettingSpec[Any]] = ()
    contracts: Sequence[tuple[Contract, Binding]] = ()
    todo: str = ""

    @property
    def module(self) -> str:
        """The module of its entry point: `acme.plugin` of `acme.plugin:Plugin`."""
        return self.target.partition(":")[0].strip()

    @property
    def claims(self) -> frozenset[tuple[str, str]]:
        """(op, impl id) of its implementations, and (op, "") of its contracts."""
        contracts = {(contract.name, "") for contract, _ in self.contracts}
        named = (i for i in self.impls if isinstance(i, Impl) and isinstance(i.op_name, str))
        return frozenset(contracts | {(impl.op_name, impl.impl_id) for impl in named})

    def fail(self, error: PluginError) -> None:
        """Mark the plugin as failed: its settings and contracts are not used."""
        self.status, self.error, self.settings, self.contracts = "failed", error, (), ()

    @property
    def is_loaded(self) -> bool:
        return self.status == "ok"

    def may_bring(self, name: str, op: str | None = None) -> bool:
        """Return whether the plugin failed and may have an impl id or vendor `name` for `op`."""
        vendor = name.removeprefix("vendor.")
        had = any(i in (name, f"vendor.{vendor}") and op in (None, of) for of, i in self.claims)
        words = re.split(r"[-_.]", f"{self.owner.plugin}-{self.owner.distribution or ''}")
        return self.error is not None and (had or vendor in words)
