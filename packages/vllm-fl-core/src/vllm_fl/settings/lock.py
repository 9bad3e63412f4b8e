"""Read the lock file of `vllm-fl plan --save`: an engine's facts, its result and its seed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .values import read_text, wrong

MARK = "vllm_fl_lock"
"""The key of the format version."""

VERSION = 3

WARN = "warn:"
"""Prefix of a path in VLLM_FL_LOCK. An engine that differs from the lock file then only logs a
warning."""

MAX_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Locked:
    """A lock file.

    Args:
        file: its path in the process that read the settings.
        facts: name -> a property of the engine. It is empty for the engine that `vllm-fl plan
            --save` starts, which is not compared.
        result: `ops`, the plan; its `digest`; `out`, the disabled implementations.
        seed: the seed of its verification, or None.
        warns: whether a difference only logs a warning.
    """

    file: str
    facts: Mapping[str, Any]
    result: Mapping[str, Any]
    seed: int | None
    warns: bool = False


def read_lock(path: str, *, key: str = "lock", origin: str = "") -> Locked:
    """Read a lock file. `path` may have the prefix `warn:`. `key` is the setting or option that
    contains the path, for errors. Raises SettingsError if the file cannot be read, is not a lock
    file, or has a different version."""
    file = path.removeprefix(WARN)
    text = read_text(file, key, origin or file, most=MAX_BYTES)
    try:
        data = json.loads(text)
        facts, result, seed = data["facts"], data["result"], data["seed"]
        is_draft = facts is result is None  # of `vllm-fl plan --save`
        is_whole = is_draft or (isinstance(facts, dict) and facts and isinstance(result, dict))
        if data[MARK] == VERSION and is_whole and isinstance(seed, int | None):
            return Locked(file, facts or {}, result or {}, seed, file != path)
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        pass
    problem = f"is not a complete version {VERSION} lock file; `vllm-fl plan --save` creates one"
    raise wrong(key, file, problem)
