"""The declarations of all settings, and the effective settings with their origins. To add one,
declare it in `Settings`, and describe it in docs/settings.md."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from ..plugins.setting import PLUGIN_KEY, SettingSpec
from .devices import DeviceOrder, Table
from .policy import PREFERENCES, Mode, OpOrder, SelectionPolicy
from .values import (
    DEVICES,
    EXTENDS,
    GROUP_ORDER_PREFIX,
    OP_CONFIG,
    ORDER_PREFIX,
    PER_OP,
    read_megabytes,
    read_platform,
    read_share,
)

if TYPE_CHECKING:
    from .lock import Locked

CONFIG = "VLLM_FL_CONFIG"

FORMER = {"VLLM_FL_ENABLED": ("VLLM_FL_PREFER_ENABLED",)}
"""Variable -> its names in vllm-plugin-FL."""

COMMAND_LINE = "--additional-config.vllm_fl"
"""The origin of an op's order that is set on vLLM's command line."""

Names = tuple[str, ...]
SomeNames = tuple[str, ...] | None

Declared = Mapping[str, SettingSpec[Any]]
"""Key -> declaration."""


@dataclass(frozen=True)
class Setting:
    """One setting's effective value.

    Args:
        key: `prefer`, `oot_blacklist`, …; for an op's order `op_backends.<op>`.
        value: text, a boolean, None, a tuple of names, an `OpOrder`, or a tuple of `DeviceOrder`.
        origin: its source: `default`, `detected`, `environment VLLM_FL_PREFER`, `/etc/fl.yaml:3`,
            `/opt/cuda.yaml:12 (vllm-fl-cuda 0.1.0)`.
        overrides: (value, origin) of the settings that it replaces or merges, nearest first. The
            value of a variable that VLLM_FL_CONFIG overrides is its unparsed text.
    """

    key: str
    value: object
    origin: str = "default"
    overrides: tuple[tuple[object, str], ...] = ()

    @property
    def names(self) -> Names:
        """The value, if it is a tuple of names."""
        return cast("Names", self.value)

    @property
    def named(self) -> str:
        """The setting as the user wrote it: `VLLM_FL_STRICT=true`, or `strict` with its file."""
        if isinstance(self.value, OpOrder) or self.key.startswith(DEVICES):
            return f"{self.key} ({self.origin})"
        text = ",".join(self.value) if isinstance(self.value, tuple) else str(self.value)
        variable = self.origin.removeprefix("environment ")
        if variable != self.origin and variable.isidentifier():
            return f"{variable}={text.lower() if isinstance(self.value, bool) else text}"
        return f"{self.key}={text} ({self.origin})"

    def replaced(self, value: object, origin: str) -> Setting:
        overrides = ((self.value, self.origin), *self.overrides)
        return dataclasses.replace(self, value=value, origin=origin, overrides=overrides)

    @property
    def undo(self) -> str:
        """The shell command that unsets it, or opens its file."""
        return undo(self.origin)


def undo(origin: str) -> str:
    """Return `Setting.undo` for a text that begins with a variable's name, or with file
    and line."""
    if in_file := re.match(r"(\S.*?):(\d+)\b", origin):
        return f"${{EDITOR:-vi}} +{in_file[2]} {shlex.quote(in_file[1])}"
    named = re.search(r"\benvironment (\w+)|^(\w+_\w+)", origin)
    return f"unset {named[1] or named[2]}" if named else "vllm-fl settings"


@dataclass(frozen=True)
class Settings(Mapping[str, Setting]):
    """All settings by key, read-only. docs/settings.md describes each.

    The class attributes are declarations. On an instance they are the effective values
    (`SettingSpec.__get__`). `load_startup` reads only settings that a process needs before its
    plugins are known. Other attributes then raise KeyError.

    Args:
        warnings: warnings for the user, one sentence each.
        unchecked: names that are unknown or not checked yet, such as `oot_blacklist.fused_moe`.
            `check_names` removes known names.
        declared: the declarations of core and of the loaded plugins.
    """

    entries: tuple[Setting, ...]
    warnings: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    tuned: Table | None = None
    locked: Locked | None = field(default=None, hash=False)
    declared: Declared = field(default_factory=lambda: ITEMS, compare=False, repr=False)

    enabled = SettingSpec("enabled", "VLLM_FL_ENABLED", True)
    config = SettingSpec[str | None]("config", CONFIG, None)
    platform = SettingSpec[str | None]("platform", "VLLM_FL_PLATFORM", None, read=read_platform)
    """forced or detected"""
    prefer = SettingSpec("prefer", "VLLM_FL_PREFER", "flagos", in_file=True, choices=PREFERENCES)
    strict = SettingSpec("strict", "VLLM_FL_STRICT", False, in_file=True)
    allow_vendors = SettingSpec[SomeNames](
        "allow_vendors", "VLLM_FL_ALLOW_VENDORS", None, in_file=True, names="vendor"
    )
    deny_vendors = SettingSpec[Names](
        "deny_vendors", "VLLM_FL_DENY_VENDORS", (), in_file=True, names="vendor"
    )
    require = SettingSpec(
        "require", "VLLM_FL_REQUIRE", "none", in_file=True, choices=("none", "batch_invariant")
    )
    table = SettingSpec[str | None]("table", "VLLM_FL_TABLE", None, in_file=True)
    lock = SettingSpec[str | None]("lock", "VLLM_FL_LOCK", None)
    oot_enabled = SettingSpec("oot_enabled", "VLLM_FL_OOT_ENABLED", True)
    oot_whitelist = SettingSpec[SomeNames](
        "oot_whitelist",
        "VLLM_FL_OOT_WHITELIST",
        None,
        in_file=True,
        names="layer",
        excludes="oot_blacklist",
    )
    oot_blacklist = SettingSpec[Names](
        "oot_blacklist", "VLLM_FL_OOT_BLACKLIST", (), in_file=True, names="layer"
    )
    preflight = SettingSpec(
        "preflight", "VLLM_FL_PREFLIGHT", "verify", choices=("verify", "full", "run", "off")
    )
    log_level = SettingSpec(
        "log_level", "VLLM_FL_LOG_LEVEL", "INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR")
    )
    debug = SettingSpec("debug", "VLLM_FL_DISPATCH_DEBUG", False)
    """Whether to print every resolution and to count calls."""
    count_calls = SettingSpec("count_calls", "VLLM_FL_COUNT_CALLS", False)
    metrics = SettingSpec[str | None]("metrics", "VLLM_FL_METRICS", None)
    shadow = SettingSpec[str | None]("shadow", "VLLM_FL_SHADOW", None, read=read_share)
    """The fraction of steps with a shadow check of the plan's calls."""
    keep_faults = SettingSpec[str | None]("keep_faults", "VLLM_FL_KEEP_FAULTS", None)
    keep_faults_mb = SettingSpec(
        "keep_faults_mb", "VLLM_FL_KEEP_FAULTS_MB", "64", read=read_megabytes
    )
    plugins = SettingSpec[SomeNames]("plugins", "VLLM_FL_PLUGINS", None, names="distribution")
    plugin_modules = SettingSpec[Names](
        "plugin_modules", "VLLM_FL_PLUGIN_MODULES", (), names="module"
    )
    flagcx_path = SettingSpec[str | None]("flagcx_path", "FLAGCX_PATH", None)

    @property
    def compares(self) -> bool:
        """Whether a startup compares results with reference results."""
        return self.preflight in ("verify", "full")

    @property
    def counts_calls(self) -> bool:
        return self.count_calls or self.debug

    @cached_property
    def _by_key(self) -> dict[str, Setting]:
        return {setting.key: setting for setting in self.entries}

    def __getitem__(self, key: str) -> Setting:
        return self._by_key[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_key)

    def __len__(self) -> int:
        return len(self._by_key)

    @cached_property
    def policy(self) -> SelectionPolicy:
        allowed = self.allow_vendors
        return SelectionPolicy(
            prefer=self.prefer,
            strict=self.strict,
            per_op_order={
                key.removeprefix(ORDER_PREFIX): cast("OpOrder", setting.value)
                for key, setting in self.items()
                if key.startswith(ORDER_PREFIX) and not key.startswith(GROUP_ORDER_PREFIX)
            },
            allow_vendors=None if allowed is None else frozenset(allowed),
            deny_vendors=frozenset(self.deny_vendors),
        )

    def without_table(self, why: str) -> Settings:
        if self.tuned is None:
            return self
        return dataclasses.replace(self, tuned=dataclasses.replace(self.tuned, unused=why))

    def with_devices(self, device: str, mode: Mode) -> Settings:
        """Return these settings with the orders for a device. Without a device name they are
        unchanged. Precedence, highest first: the user's orders for the device, the user's orders
        for any device, the tuning table, orders of backends for the device. The user's `prefer`
        also overrides orders of backends."""
        if not device:
            return self
        entries = dict(self._by_key)
        has_table = self.tuned is not None and not self.tuned.unused
        for op, orders in self.by_device.items():
            used = (each for each in orders if has_table or not each.of_table)
            found = next((o for o in used if o.holds(device) and o.order.rows(mode)), None)
            if found is None:
                continue
            yields = self.policy.names(op) or ("prefer" in self.chosen and not found.of_table)
            if found.order.pinned or not yields:
                key = f"{ORDER_PREFIX}{op}"
                rows = found.over(self.policy.order(op, mode, engine=True), mode)
                changes: dict[str, Any] = {mode: rows}
                order = dataclasses.replace(found.order, **changes)
                new = Setting(key, order, found.why)
                entries[key] = entries[key].replaced(order, found.why) if key in entries else new
        if entries == self._by_key:
            return self
        return dataclasses.replace(self, entries=tuple(entries.values()))

    @property
    def by_device(self) -> dict[str, tuple[DeviceOrder, ...]]:
        """Op -> its orders for some devices. The first order that matches the engine's device is
        used."""
        return {
            key.removeprefix(DEVICES): cast("tuple[DeviceOrder, ...]", setting.value)
            for key, setting in self.items()
            if key.startswith(DEVICES)
        }

    @property
    def held_by_device(self) -> dict[str, str]:
        """Op -> origin and measurement of its order for the device. Only after `with_devices`."""
        whys = {op: {order.why for order in orders} for op, orders in self.by_device.items()}
        held = {op: self.get(f"{ORDER_PREFIX}{op}") for op in whys}
        return {op: own.origin for op, own in held.items() if own and own.origin in whys[op]}

    @property
    def unowned(self) -> tuple[str, ...]:
        """The keys or variables of settings without a loaded plugin. They have no effect."""
        return tuple(
            key
            for key in self
            if key not in self.declared
            and key != "platform_files"
            and not key.startswith((ORDER_PREFIX, DEVICES))
        )

    @property
    def chosen(self) -> dict[str, Setting]:
        starts, chosen = ("environment ", COMMAND_LINE, f"{self.config}:"), {}
        for key, setting in self.items():
            if setting.origin.startswith(starts) or f"(environment {OP_CONFIG})" in setting.origin:
                chosen[key] = setting
        return chosen

    def __reduce__(self) -> tuple[Any, ...]:
        # Declarations are not pickled, because a plugin's `read` may not be picklable.
        return Settings, (self.entries, self.warnings, self.unchecked, self.tuned, self.locked)


ITEMS: Declared = MappingProxyType(
    {spec.key: spec for spec in vars(Settings).values() if isinstance(spec, SettingSpec)}
)


def variables_of(spec: SettingSpec[Any]) -> tuple[str, ...]:
    return (spec.variable, *FORMER.get(spec.variable, ()))


def variables(declared: Declared) -> tuple[str, ...]:
    return (*(v for spec in declared.values() for v in variables_of(spec)), PER_OP, OP_CONFIG)


def overridden(declared: Declared) -> tuple[str, ...]:
    """Return the variables that VLLM_FL_CONFIG overrides."""
    return variables({key: spec for key, spec in declared.items() if spec.in_file})


def file_keys(declared: Declared) -> tuple[str, ...]:
    keys = (key for key, spec in declared.items() if spec.in_file)
    return (*keys, ORDER_PREFIX.rstrip("."), DEVICES.rstrip("."), EXTENDS)


def pairs(declared: Declared) -> tuple[tuple[str, str], ...]:
    """Return (whitelist, blacklist) of each pair. A layer must not set both."""
    return tuple((spec.key, spec.excludes) for spec in declared.values() if spec.excludes)


def is_absent(name: str, declared: Declared) -> bool:
    """Return whether a key or variable belongs to a plugin that is not loaded."""
    found = re.fullmatch(PLUGIN_KEY, name)
    known = (each for spec in declared.values() for each in (spec.key, *variables_of(spec)))
    return found is not None and not any(each.startswith(found[1]) for each in known)


VARIABLES = variables(ITEMS)

RESERVED_NAMES = (*VARIABLES, *ITEMS)
