"""The effective settings: each value with its origin and what it replaced. Values only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from ..text import quote
from .policy import OpOrder, SelectionPolicy
from .schema import ITEMS, ORDER_PREFIX, order_of, wrong

__all__ = ["Setting", "Settings"]


@dataclass(frozen=True)
class Setting:
    """One setting's effective value.

    Args:
        key: `prefer`, `flagos_blacklist`, …; an op's order is `op_backends.<op>`.
        value: text, a boolean, None, a tuple of names, or an `OpOrder`.
        origin: where it comes from: `default`, `detected`, `environment VLLM_FL_PREFER`,
            `/etc/fl.yaml:3`, `/opt/cuda.yaml:12 (vllm-fl-cuda 0.1.0)`.
        overrides: (value, origin) of what it replaced, the nearest first. A variable that
            VLLM_FL_CONFIG overrides is shown by its text, unread.
        variable: the environment variable that sets it, or None.
        merged: (value, origin) of each platform file that sets it, where several do.
        disagreements: where those contradict each other, and what holds instead; one sentence each.
    """

    key: str
    value: object
    origin: str = "default"
    overrides: tuple[tuple[object, str], ...] = ()
    variable: str | None = None
    merged: tuple[tuple[object, str], ...] = ()
    disagreements: tuple[str, ...] = ()


@dataclass(frozen=True)
class Settings(Mapping[str, Setting]):
    """Every setting by its key, read-only.

    `load_startup` gives only those that a process needs before its plugins are known; reading
    another one of those is a KeyError.

    Args:
        entries: the settings, in the order of the reference.
        warnings: what the user should hear, one sentence each.
        unchecked: names that nobody has checked yet, or that their owner does not know, as
            `oot_blacklist.fused_moe`; `check_names` shortens it.
    """

    entries: tuple[Setting, ...]
    warnings: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()

    @cached_property
    def _by_key(self) -> dict[str, Setting]:
        return {setting.key: setting for setting in self.entries}

    def __getitem__(self, key: str) -> Setting:
        return self._by_key[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_key)

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: object) -> bool:
        return key in self._by_key

    @cached_property
    def policy(self) -> SelectionPolicy:
        """What decides between implementations."""
        allowed = self._some("allow_vendors")
        return SelectionPolicy(
            prefer=self._text("prefer"),
            strict=self._flag("strict"),
            per_op_order={
                key.removeprefix(ORDER_PREFIX): cast("OpOrder", setting.value)
                for key, setting in self.items()
                if key.startswith(ORDER_PREFIX)
            },
            allow_vendors=None if allowed is None else frozenset(allowed),
            deny_vendors=frozenset(self._names("deny_vendors")),
        )

    @property
    def enabled(self) -> bool:
        """False: vllm-fl steps aside entirely."""
        return self._flag("enabled")

    @property
    def platform(self) -> str | None:
        """The platform whose files count, forced or detected."""
        return self._path("platform")

    @property
    def use_flaggems(self) -> bool:
        """False: no FlagGems at all, neither ops nor ATen."""
        return self._flag("use_flaggems")

    @property
    def flagos_whitelist(self) -> tuple[str, ...] | None:
        """The only FlagGems ops that are used, or None."""
        return self._some("flagos_whitelist")

    @property
    def flagos_blacklist(self) -> tuple[str, ...]:
        """FlagGems ops that are not used."""
        return self._names("flagos_blacklist")

    @property
    def oot_enabled(self) -> bool:
        """Whether vLLM's layers are replaced."""
        return self._flag("oot_enabled")

    @property
    def oot_whitelist(self) -> tuple[str, ...] | None:
        """The only vLLM layers that are replaced, or None."""
        return self._some("oot_whitelist")

    @property
    def oot_blacklist(self) -> tuple[str, ...]:
        """vLLM layers that are not replaced."""
        return self._names("oot_blacklist")

    @property
    def preflight(self) -> str:
        """`verify`, `run` or `off`."""
        return self._text("preflight")

    @property
    def log_level(self) -> str:
        """`DEBUG`, `INFO`, `WARNING` or `ERROR`."""
        return self._text("log_level")

    @property
    def debug(self) -> bool:
        """Whether every resolution is printed and calls are counted."""
        return self._flag("debug")

    @property
    def plugins(self) -> tuple[str, ...] | None:
        """The distributions whose plugins are loaded, or None for all."""
        return self._some("plugins")

    @property
    def plugin_modules(self) -> tuple[str, ...]:
        """Modules that are loaded as plugins."""
        return self._names("plugin_modules")

    @property
    def strict_plugins(self) -> bool:
        """Whether a plugin that fails ends the start."""
        return self._flag("strict_plugins")

    @property
    def flagcx_path(self) -> str | None:
        """Where FlagCX lies, or None."""
        return self._path("flagcx_path")

    @property
    def oplist_path(self) -> str:
        """Where rank 0 lists the FlagGems ops that are enabled."""
        return self._text("oplist_path")

    def to_json(self) -> dict[str, Any]:
        """These settings as plain JSON data, for a process that has another environment."""
        return {
            "settings": [
                {
                    "key": setting.key,
                    "value": _encode(setting.value),
                    "origin": setting.origin,
                    "overrides": _encode_each(setting.overrides),
                    "variable": setting.variable,
                    "merged": _encode_each(setting.merged),
                    "disagreements": list(setting.disagreements),
                }
                for setting in self.entries
            ],
            "warnings": list(self.warnings),
            "unchecked": list(self.unchecked),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Settings:
        """What `to_json` gave.

        Raises:
            SettingsError: it is something else, as from another release of vllm-fl-core.
        """
        try:
            settings = cls(
                tuple(
                    Setting(
                        entry["key"],
                        _decode(entry["value"]),
                        _str(entry["origin"]),
                        _decode_each(entry["overrides"]),
                        entry["variable"],
                        _decode_each(entry["merged"]),
                        tuple(map(_str, entry["disagreements"])),
                    )
                    for entry in data["settings"]
                ),
                tuple(map(_str, data["warnings"])),
                tuple(map(_str, data["unchecked"])),
            )
            bad = [
                key for key, item in ITEMS.items() if not item.values.accepts(settings[key].value)
            ]
            bad += [
                key
                for key, setting in settings.items()
                if key.startswith(ORDER_PREFIX) and not isinstance(setting.value, OpOrder)
            ]
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            bad = [quote(error)]
        if bad:
            raise wrong(
                "settings",
                "JSON",
                f"not what this vllm-fl-core writes ({bad[0]}); install the same release of it "
                "wherever a worker of one engine runs",
            )
        return settings

    def _flag(self, key: str) -> bool:
        return cast("bool", self[key].value)

    def _text(self, key: str) -> str:
        return cast("str", self[key].value)

    def _path(self, key: str) -> str | None:
        return cast("str | None", self[key].value)

    def _names(self, key: str) -> tuple[str, ...]:
        return cast("tuple[str, ...]", self[key].value)

    def _some(self, key: str) -> tuple[str, ...] | None:
        return cast("tuple[str, ...] | None", self[key].value)


def _encode(value: object) -> object:
    if isinstance(value, OpOrder):
        sides = {"eager": value.eager, "compiled": value.compiled}
        order = {mode: [str(t) for t in tokens] for mode, tokens in sides.items() if tokens}
        left_out = [list(pair) for pair in sorted(value.left_out)]
        return {"order": order, "pinned": value.pinned, "left_out": left_out}
    return list(value) if isinstance(value, tuple) else value


def _encode_each(values: tuple[tuple[object, str], ...]) -> list[dict[str, object]]:
    return [{"value": _encode(value), "origin": origin} for value, origin in values]


def _decode(value: object) -> object:
    if isinstance(value, Mapping):
        order = order_of(value["order"], pinned=bool(value["pinned"]))
        left_out = frozenset((_str(mode), _str(impl_id)) for mode, impl_id in value["left_out"])
        return dataclasses.replace(order, left_out=left_out)
    return tuple(map(_str, value)) if isinstance(value, list) else value


def _decode_each(values: Iterable[Mapping[str, Any]]) -> tuple[tuple[object, str], ...]:
    return tuple((_decode(each["value"]), _str(each["origin"])) for each in values)


def _str(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {type(value).__name__}")
    return value
