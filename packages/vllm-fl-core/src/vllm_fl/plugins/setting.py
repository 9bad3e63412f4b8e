"""The declaration of a setting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar, overload

T = TypeVar("T")

PLUGIN_KEY = r"(?i)((?:VLLM_FL_)?(?:flagos|reference|vendor_[a-z0-9]+)_|USE_FLAG)\w+"
"""The keys that plugins' settings have in files, and variables of theirs: those of a plugin that is
not installed are told from slips by what they begin with."""


@dataclass(frozen=True, eq=False)
class SettingSpec(Generic[T]):
    """The declaration of one setting, from which everything about it follows.

    Args:
        key: its name in files and in reports.
        variable: its environment variable.
        default: its value where nobody sets it, which also says what it takes: true or false where
            it is a boolean, a list where `names` is given, text otherwise.
        in_file: whether a YAML file may set it. VLLM_FL_CONFIG overrides exactly these.
        names: what the names in a list are, for messages (`vendor`). Of several platform files,
            lists whose default is `()` add up, and of those whose default is None only the names
            that all of them list are left.
        choices: the words that it takes; empty for any text.
        read: reads a variable's text where that takes more; raises ValueError.
        excludes: of a whitelist, whose default is None, the key of its blacklist: one layer may set
            one of the two.
        known: of a list of what is left out, all names that do something in an engine, as
            `vllm-fl bisect` leaves out some of them. It may import the backend's library, and is
            called in a process of its own.

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
            "key and variable are identifiers": all(
                isinstance(name, str) and name.isidentifier() for name in names
            ),
            "a default is a boolean, text or None; that of a list, which has names='<what they "
            "are>', is None or a tuple of names": default is None or is_plain,
            "choices is a tuple of the words that a text takes, the default included": (
                not self.choices
                or (_are_words(self.choices) and default in (None, *self.choices) and not lists)
            ),
        }
        if broken := [rule for rule, holds in rules.items() if not holds]:
            raise ValueError(f"SettingSpec({self.key!r}): {broken[0]}")

    @overload
    def __get__(self, settings: None, owner: type) -> Self: ...
    @overload
    def __get__(self, settings: Mapping[str, Any], owner: type) -> T: ...
    def __get__(self, settings: Mapping[str, Any] | None, owner: type) -> Self | T:
        """As an attribute of settings it is its effective value."""
        return self if settings is None else settings[self.key].value


def _are_words(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(word, str) for word in value)
