"""Read and check the values of settings."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import InvalidSettingError, MissingFileError, SettingsError
from ..plugins.setting import SettingSpec
from ..text import closest, quote
from .policy import GROUP_PREFIX

T = TypeVar("T")

PER_OP = "VLLM_FL_PER_OP"
OP_CONFIG = "VLLM_FL_OP_CONFIG"

ORDER_PREFIX = "op_backends."
"""Prefix of the key of an op's order. Each op is a separate setting."""

DEVICES = "devices."
"""Prefix of the key of an op's orders for some devices."""

EXTENDS = "extends"
"""The key that makes a user's file extend the lower layers."""

GROUP_ORDER_PREFIX = f"{ORDER_PREFIX}{GROUP_PREFIX}"
"""Prefix of the key of a group's order. It is replaced later by orders of the group's ops."""

IN_TREE = ("cuda", "cpu", "rocm", "tpu", "xpu")
"""The platforms that are part of vLLM, by vLLM's names."""

PLATFORMS = (*IN_TREE, "ascend")
PLATFORM_ALIASES = {"nvidia": "cuda", "npu": "ascend"}

MAX_BYTES = 64 * 1024
"""Maximum bytes of a settings file. The limit is low because each startup parses the file."""

BOOLEANS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def normalise_platform(name: str) -> str:
    """Lower-case a platform's name, and replace aliases."""
    lower = name.strip().lower()
    return PLATFORM_ALIASES.get(lower, lower)


def wrong(
    key: str, origin: str, problem: str, *, kind: type[SettingsError] = InvalidSettingError
) -> SettingsError:
    op = key.removeprefix(ORDER_PREFIX) if key.startswith(ORDER_PREFIX) else None
    key = _short(key if key.isprintable() else ascii(key), 80)
    return kind(f"{origin}: {key}: {_short(problem, 600)}", key=key, origin=origin, op=op)


def read_value(read: Callable[[Any], T], value: object, key: str, origin: str) -> T:
    """Return `read(value)`. A ValueError becomes the SettingsError of this setting."""
    try:
        return read(value)
    except ValueError as error:
        raise wrong(key, origin, str(error)) from error


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def name_of(value: str) -> str:
    """Check a name in a list (an op, a layer, a vendor, a module). Raises ValueError."""
    if not re.fullmatch(r"[\w.+:-]+", value):
        problem = "is not a valid name; a name has no spaces, quotes or separators"
        raise ValueError(f"{value!r} {problem}")
    return value


def is_ordered(name: str) -> bool:
    """Whether this name can have an order: an op, `default`, or `group:NAME`."""
    return name.removeprefix(GROUP_PREFIX).isidentifier()


def expected(spec: SettingSpec[Any]) -> str:
    if isinstance(spec.default, bool):
        return "true or false"
    if spec.names:
        return "a list of names"
    return f"one of {', '.join(spec.choices)}" if spec.choices else "text"


def value_of(spec: SettingSpec[Any], text: str) -> object:
    """Parse the text of a setting. Raises ValueError."""
    if spec.read is not None:
        try:
            value = spec.read(text)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plugin's `read` may raise anything
            raise ValueError(quote(error).removeprefix("ValueError: ")) from error
        if not spec.fits(value):
            read, kind = f"its `read` of {spec.read.__module__}", type(value).__name__
            raise ValueError(f"{read} returned {kind}; the plugin must return {expected(spec)}")
        return value
    if isinstance(spec.default, bool):
        if text.lower() not in BOOLEANS:
            raise ValueError(f"expected 0 or 1 (also true, false, yes, no, on, off), got {text!r}")
        return BOOLEANS[text.lower()]
    if spec.names:
        parts = (part.strip() for part in text.split(","))
        names = tuple(dict.fromkeys(name_of(part) for part in parts if part))
        if text and not names:
            problem = "contains no name; unset it, or write a comma-separated list"
            raise ValueError(f"{text!r} {problem}")
        return names
    if not spec.choices:
        return text
    word = text.upper() if spec.choices[0].isupper() else text.lower()
    if word not in spec.choices:
        raise ValueError(f"expected {expected(spec)}, got {text!r}.{closest(word, spec.choices)}")
    return word


def read_text(path: str, key: str, origin: str, *, most: int = MAX_BYTES) -> str:
    """Return the text of a file. Raises only SettingsError."""
    where = "" if os.path.isabs(path) else " (relative to the working directory)"
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe may block, a device may never end
            raise wrong(key, origin, f"{path!r} is not a regular file")
        with open(path, "rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise wrong(key, origin, f"{path!r} has more than {most} bytes; check the path")
        return data.decode("utf-8-sig")
    except SettingsError:  # a SettingsError may be a ValueError
        raise
    except FileNotFoundError as error:
        problem = f"{path!r} does not exist{where}"
        raise wrong(key, origin, problem, kind=MissingFileError) from error
    except (OSError, ValueError) as error:  # invalid UTF-8, or a path with a NUL
        why = getattr(error, "strerror", None) or error
        raise wrong(key, origin, f"{path!r} cannot be read: {why}") from error


def read_share(text: str) -> str | None:
    """Check a fraction such as `0.01`. Return None for 0. Raises ValueError."""
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"expected a fraction from 0 to 1, such as 0.01, got {text!r}")
    return text if share else None


def read_megabytes(text: str) -> str:
    """Check a positive number of megabytes. Raises ValueError."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ValueError(f"expected a number of megabytes, such as 64, got {text!r}")
    return text


def read_platform(text: str) -> str:
    name = normalise_platform(text)
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
        raise ValueError(f"expected a platform such as {', '.join(PLATFORMS)}, got {text!r}")
    return name
