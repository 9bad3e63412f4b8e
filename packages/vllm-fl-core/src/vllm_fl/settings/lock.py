"""The file of `vllm-fl plan --save`: what an engine ran with, and the seed of its verification."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .values import read_text, wrong

MARK = "vllm_fl_lock"
"""The key of the version of the file's form. Another version is not read."""

VERSION = 3

WARN = "warn:"
"""What VLLM_FL_LOCK has before the name of a file from which an engine may differ."""

MAX_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Locked:
    """A lock that the settings name, as an engine's processes have it.

    Args:
        file: the file that it was read from, in the process that read the settings.
        facts: name -> what the engine was made of. Empty in the file under which
            `vllm-fl plan --save` starts an engine: such a startup is compared with nothing.
        result: the outcome: `ops`, the plan that served; its `digest`; `out`, what was disabled.
        seed: the seed of its verification, or None.
        warns: whether an engine that differs only warns.
    """

    file: str
    facts: Mapping[str, Any]
    result: Mapping[str, Any]
    seed: int | None
    warns: bool = False


def read_lock(path: str, *, key: str = "lock", origin: str = "") -> Locked:
    """Read a lock's file.

    Args:
        path: the file; after `warn:` an engine that differs only warns.
        key: the setting, or option, that names it, for errors.
        origin: where that is.

    Raises:
        SettingsError: it cannot be read, is not a lock, or is another version's.
    """
    file = path.removeprefix(WARN)
    text = read_text(file, key, origin or file, most=MAX_BYTES)
    try:
        data = json.loads(text)
        if data.pop(MARK) == VERSION:
            return Locked(file, data["facts"], data["result"], data["seed"], file != path)
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        pass
    problem = f"is not a whole lock of version {VERSION}. `vllm-fl plan --save` writes another"
    raise wrong(key, file, problem)
