"""One installed plugin: who brought it, and what became of it."""

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

Status = Literal["found", "ok", "failed", "disabled"]

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


@dataclass(eq=False)
class Plugin:
    """One installed plugin and what became of it. Only `load` changes it.

    Args:
        owner: its entry point's name, distribution, version and path.
        target: what the entry point points at (`acme.plugin`).
        load: imports that.
        kind: its purpose. A plugin of kind `contracts` has only contracts. An `extension` belongs
            to this project, provides no implementations, and is loaded regardless of
            VLLM_FL_PLUGINS.
        status: `found`, and after loading `ok`, `failed`, or `disabled` (VLLM_FL_PLUGINS leaves it
            out).
        error: why it failed.
        hooks: the hooks that it implements, each as a function that returns a list of results;
            `register_builtins` is the older form.
        verifies: whether it is a verifier: its module declares `VERIFIES = True`.
        impls: its implementations.
        settings: the settings that it declares.
        contracts: its ops, each with its targets in vLLM.
        todo: how to do without it.
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
        """The module that its entry point is in: `acme.plugin` of `acme.plugin:Plugin`."""
        return self.target.partition(":")[0].strip()

    @property
    def claims(self) -> frozenset[tuple[str, str]]:
        """(op, impl id) of its implementations, and (op, "") of its contracts."""
        contracts = {(contract.name, "") for contract, _ in self.contracts}
        named = (i for i in self.impls if isinstance(i, Impl) and isinstance(i.op_name, str))
        return frozenset(contracts | {(impl.op_name, impl.impl_id) for impl in named})

    def fail(self, error: PluginError) -> None:
        """Note that it failed: none of its settings and contracts is used."""
        self.status, self.error, self.settings, self.contracts = "failed", error, (), ()

    @property
    def is_loaded(self) -> bool:
        """Whether its hooks may be called."""
        return self.status == "ok"

    def may_bring(self, name: str, op: str | None = None) -> bool:
        """Whether it failed, and may have had an impl id or vendor called `name`, for `op`."""
        vendor = name.removeprefix("vendor.")
        had = any(i in (name, f"vendor.{vendor}") and op in (None, of) for of, i in self.claims)
        words = re.split(r"[-_.]", f"{self.owner.plugin}-{self.owner.distribution or ''}")
        return self.error is not None and (had or vendor in words)
