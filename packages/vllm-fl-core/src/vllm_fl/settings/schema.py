"""What can be set: every setting's key, variable, default and the values it takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..errors import InvalidSettingError, SettingsError
from .policy import KINDS, OpOrder, Token, closest

__all__ = [
    "APPEND",
    "CONFIG",
    "FILE_KEYS",
    "ITEMS",
    "OP_CONFIG",
    "ORDER_PREFIX",
    "OVERRIDDEN",
    "PER_OP",
    "PLATFORMS",
    "VARIABLES",
    "Item",
    "Values",
    "name_of",
    "near",
    "normalise_platform",
    "order_of",
    "wrong",
]

CONFIG = "VLLM_FL_CONFIG"
PER_OP = "VLLM_FL_PER_OP"
OP_CONFIG = "VLLM_FL_OP_CONFIG"
APPEND = "VLLM_FL_FLAGOS_BLACKLIST_APPEND"

ORDER_PREFIX = "op_backends."
"""The key of an op's order is this and the op's name: each op is an item of its own."""

PLATFORMS = ("cuda", "ascend", "cpu")
PLATFORM_ALIASES = {"nvidia": "cuda", "npu": "ascend"}

MAX_TOKENS = 64
"""An order of more tokens is a mistake, or an attack by YAML aliases."""

BOOLEANS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def normalise_platform(name: str) -> str:
    """The name that settings files use: lower case, `nvidia` is `cuda`, `npu` is `ascend`."""
    lower = name.strip().lower()
    return PLATFORM_ALIASES.get(lower, lower)


def wrong(
    key: str, origin: str, problem: str, *, kind: type[SettingsError] = InvalidSettingError
) -> SettingsError:
    """The error of one setting: where it stands, which one it is, what is wrong with it."""
    op = key.removeprefix(ORDER_PREFIX) if key.startswith(ORDER_PREFIX) else None
    key = _short(key if key.isprintable() else ascii(key), 80)
    return kind(f"{origin}: {key}: {_short(problem, 600)}", key=key, origin=origin, op=op)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def near(word: str, known: Iterable[str]) -> str | None:
    """The known name that `word` is most likely a slip of, or None. Stricter than a suggestion."""
    import difflib  # only for a word that is wrong

    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.8)
    return found[0] if found else None


def name_of(value: str) -> str:
    """One name of a list: an op, a layer, a vendor, a module. Raises ValueError."""
    if not re.fullmatch(r"[\w.+:-]+", value):
        raise ValueError(f"{value!r} is no name; a name has no spaces, quotes or separators")
    return value


def order_of(value: object, *, pinned: bool = True) -> OpOrder:
    """An op's order from plain data: a token, a list of them, or `{eager: …, compiled: …}`.

    Raises:
        ValueError: another type, an unknown token or mode, an empty or an endless list.
    """
    sides = value.values() if isinstance(value, Mapping) else [value]
    for side in sides:
        tokens = [side] if isinstance(side, str) else side
        if not isinstance(tokens, Sequence) or not all(isinstance(t, str) for t in tokens):
            raise ValueError("expected a token, a list of tokens, or the lists eager and compiled")
        if len(tokens) > MAX_TOKENS:
            raise ValueError(f"an order has at most {MAX_TOKENS} tokens")
        for token in tokens:
            name = Token.parse(token).name
            if name is not None:
                name_of(name)
    return OpOrder.of(value, pinned=pinned)


@dataclass(frozen=True)
class Values:
    """The values that a setting takes.

    Args:
        expected: what an error says was expected.
        of_text: reads a variable's text; raises ValueError.
        accepts: whether a value, read or from JSON, is one.
    """

    expected: str
    of_text: Callable[[str], object]
    accepts: Callable[[object], bool]


@dataclass(frozen=True)
class Item:
    """One setting.

    Args:
        key: its name in files and in reports.
        variable: its environment variable.
        values: what it takes.
        default: its value where no layer sets it.
        in_file: whether a YAML file may set it. VLLM_FL_CONFIG overrides exactly these.
    """

    key: str
    variable: str
    values: Values
    default: Any = None
    in_file: bool = False


def _boolean(text: str) -> bool:
    if text.lower() not in BOOLEANS:
        raise ValueError(f"expected 0 or 1 (also true, false, yes, no, on, off), got {text!r}")
    return BOOLEANS[text.lower()]


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name_of(part.strip()) for part in text.split(",") if part.strip()))
    if text and not names:
        raise ValueError(f"{text!r} names nothing; unset it, or write a comma-separated list")
    return names


def _prefer(text: str) -> str:
    if text.lower() in KINDS:
        return text.lower()
    slip = near(text.lower(), KINDS)
    raise ValueError(
        f"expected one of {', '.join(KINDS)}, got {text!r}. "
        + (
            f"Did you mean {slip!r}?"
            if slip
            else "It prefers a kind of backend, never one vendor: prefer 'vendor' for any vendor "
            f"that is available, and name one for an op by {PER_OP}='rms_norm=vendor:cuda|"
            "flagos|reference' (in a file, op_backends)."
        )
    )


def _choice(choices: Sequence[str], fold: Callable[[str], str]) -> Values:
    def of_text(text: str) -> str:
        if fold(text) in choices:
            return fold(text)
        raise ValueError(
            f"expected one of {', '.join(choices)}, got {text!r}.{closest(fold(text), choices)}"
        )

    return Values(f"one of {', '.join(choices)}", of_text, choices.__contains__)


def _platform(text: str) -> str:
    name = normalise_platform(text)
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
        raise ValueError(f"expected a platform such as {', '.join(PLATFORMS)}, got {text!r}")
    return name


def _is_names(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(name, str) for name in value)


def _is_text(value: object) -> bool:
    return value is None or isinstance(value, str)


BOOLEAN = Values("true or false", _boolean, lambda value: isinstance(value, bool))
NAMES = Values("a list of names", _names, _is_names)
SOME_NAMES = Values("a list of names", _names, lambda value: value is None or _is_names(value))
PREFER = Values(f"one of {', '.join(KINDS)}", _prefer, KINDS.__contains__)
PLATFORM = Values("a platform's name", _platform, _is_text)
PATH = Values("a path", str, _is_text)

ITEMS: Mapping[str, Item] = MappingProxyType(
    {
        item.key: item
        for item in (
            Item("enabled", "VLLM_FL_PREFER_ENABLED", BOOLEAN, True),
            Item("config", CONFIG, PATH),
            Item("platform", "VLLM_FL_PLATFORM", PLATFORM),
            Item("prefer", "VLLM_FL_PREFER", PREFER, "flagos", in_file=True),
            Item("strict", "VLLM_FL_STRICT", BOOLEAN, False, in_file=True),
            Item("allow_vendors", "VLLM_FL_ALLOW_VENDORS", SOME_NAMES, in_file=True),
            Item("deny_vendors", "VLLM_FL_DENY_VENDORS", NAMES, (), in_file=True),
            Item("use_flaggems", "USE_FLAGGEMS", BOOLEAN, True),
            Item("flagos_whitelist", "VLLM_FL_FLAGOS_WHITELIST", SOME_NAMES, in_file=True),
            Item("flagos_blacklist", "VLLM_FL_FLAGOS_BLACKLIST", NAMES, (), in_file=True),
            Item("oot_enabled", "VLLM_FL_OOT_ENABLED", BOOLEAN, True),
            Item("oot_whitelist", "VLLM_FL_OOT_WHITELIST", SOME_NAMES, in_file=True),
            Item("oot_blacklist", "VLLM_FL_OOT_BLACKLIST", NAMES, (), in_file=True),
            Item(
                "preflight",
                "VLLM_FL_PREFLIGHT",
                _choice(("verify", "run", "off"), str.lower),
                "verify",
            ),
            Item(
                "log_level",
                "VLLM_FL_LOG_LEVEL",
                _choice(("DEBUG", "INFO", "WARNING", "ERROR"), str.upper),
                "INFO",
            ),
            Item("debug", "VLLM_FL_DISPATCH_DEBUG", BOOLEAN, False),
            Item("plugins", "VLLM_FL_PLUGINS", SOME_NAMES),
            Item("plugin_modules", "VLLM_FL_PLUGIN_MODULES", NAMES, ()),
            Item("strict_plugins", "VLLM_FL_STRICT_PLUGINS", BOOLEAN, False),
            Item("flagcx_path", "FLAGCX_PATH", PATH),
            Item(
                "oplist_path",
                "FLAGGEMS_ENABLE_OPLIST_PATH",
                PATH,
                "/tmp/flaggems_enable_oplist.txt",
            ),
        )
    }
)

VARIABLES: tuple[str, ...] = (
    *(item.variable for item in ITEMS.values()),
    PER_OP,
    OP_CONFIG,
    APPEND,
)
"""Every environment variable that is a setting."""

FILE_KEYS: tuple[str, ...] = (
    *(item.key for item in ITEMS.values() if item.in_file),
    ORDER_PREFIX.rstrip("."),
)
"""The keys of a YAML file."""

OVERRIDDEN: tuple[str, ...] = (
    *(item.variable for item in ITEMS.values() if item.in_file),
    PER_OP,
    OP_CONFIG,
    APPEND,
)
"""The variables that VLLM_FL_CONFIG overrides."""
