"""The declarations of a setting, and of a plugin's file of settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar, overload

T = TypeVar("T")

PLUGIN_KEY = r"(?i)((?:VLLM_FL_)?(?:flagos|reference|vendor_[a-z0-9]+)_|USE_FLAG)\w+"
"""Matches the keys and variables of plugins' settings. The prefix distinguishes a setting of a
plugin that is not installed from a misspelled key."""


@dataclass(frozen=True, eq=False)
class SettingSpec(Generic[T]):
    """The declaration of one setting. Core reads, checks and reports the setting accordingly.

    Args:
        key: its name in files and in reports.
        variable: its environment variable.
        default: the value if the setting is not set. The setting is boolean if the default is, a
            list if `names` is set, and otherwise text.
        in_file: whether a YAML file may set it. VLLM_FL_CONFIG overrides only such settings.
        names: the kind of names in a list, for messages (`vendor`). Lists of several platform files
            are joined if the default is `()`, and intersected if it is None.
        choices: the allowed words; empty for any text.
        read: parses a text instead of the rules above; raises ValueError. It returns a value of the
            same type, or None unless the default is boolean.
        excludes: for a whitelist (default None), the key of its blacklist. A layer of settings must
            not set both.
        known: for a blacklist, all names that have an effect in an engine. `vllm-fl bisect` tries
            subsets of them. The function may import the backend's library, because it is called in
            a separate process.

    Raises:
        ValueError: a field is not as described above.
    """

    key: str
    variable: str
    default: T
    in_file: bool = field(default=False, kw_only=True)
    names: str = field(default="", kw_only=True)
    choices: tuple[str, ...] = field(default=(), kw_only=True)
    read: Callable[[str], T] | None = field(default=None, kw_only=True)
    excludes: str | None = field(default=None, kw_only=True)
    known: Callable[[], Iterable[str]] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        names = (self.key, self.variable)
        lists, default = bool(self.names), self.default
        is_plain = _are_words(default) if lists else isinstance(default, bool | str)
        rules = {
            "key and variable must be identifiers": all(
                isinstance(name, str) and name.isidentifier() for name in names
            ),
            "default must be boolean, text or None; with names='<what they are>', None or a tuple "
            "of names": default is None or is_plain,
            "choices must be a tuple of the accepted words, including the default": (
                not self.choices
                or (_are_words(self.choices) and default in (None, *self.choices) and not lists)
            ),
        }
        if broken := [rule for rule, holds in rules.items() if not holds]:
            raise ValueError(f"SettingSpec({self.key!r}): {broken[0]}")

    def fits(self, value: object) -> bool:
        """Whether a value has the type of the setting."""
        if isinstance(self.default, bool):
            return isinstance(value, bool)
        return value is None or (_are_words(value) if self.names else isinstance(value, str))

    @overload
    def __get__(self, settings: None, owner: type) -> Self: ...
    @overload
    def __get__(self, settings: Mapping[str, Any], owner: type) -> T: ...
    def __get__(self, settings: Mapping[str, Any] | None, owner: type) -> Self | T:
        """Return the effective value if accessed as an attribute of `Settings`."""
        return self if settings is None else settings[self.key].value


def _are_words(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(word, str) for word in value)


@dataclass(frozen=True)
class PolicyDefaults:
    """A plugin's settings for one platform, in a YAML file.

    Args:
        path: the file. It may have the keys of a user file except `extends`, `allow_vendors`,
            `table` and the order of `default`. Orders by size are allowed only under `devices`.
    """

    path: str | os.PathLike[str]
