"""JSON files that a verb writes and a setting names: how they are read, and what seals them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from .values import read_text, wrong


def hash_of(contents: Mapping[str, Any]) -> str:
    """16 hexadecimal digits of what a file has, whatever the order of its keys."""
    text = json.dumps(contents, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_json(path: str, key: str, origin: str, *, most: int, what: str, anew: str) -> Any:
    """What a file has.

    Args:
        path: the file.
        key: the setting, or option, that names it, for errors.
        origin: where that stands; empty for the file itself.
        most: the bytes that it may have.
        what: what it should be, a noun, for errors.
        anew: how one gets another, for errors.

    Raises:
        SettingsError: it cannot be read, or is no whole JSON.
    """
    text = read_text(path, key, origin or path, most=most)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        at = path if line is None else f"{path}:{line}"
        problem = f"is no whole {what}: {getattr(error, 'msg', error)}. {anew}"
        raise wrong(key, at, problem) from error
