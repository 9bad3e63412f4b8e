"""The file of `vllm-fl plan --save`: what an engine ran with, and the seed of its verification.

A value and its file, no more: `operate/locking.py` compares it with an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .sealed import hash_of, read_json
from .values import wrong

MARK = "vllm_fl_lock"
"""The key of the version of the file's form. Another version is not read."""

VERSION = 2

MAX_BYTES = 64 * 2**20

ANEW = "`vllm-fl plan --save` writes another"


@dataclass(frozen=True)
class Locked:
    """A lock that the settings name, as an engine's processes have it.

    Args:
        file: the file that it was read from, in the process that read the settings.
        facts: name -> what the engine was made of. Empty in the file under which
            `vllm-fl plan --save` starts an engine: such a start is compared with nothing.
        result: what it came to: `ops`, the plan that served; `digest`, of that plan; `out`, what
            the start took out.
        seed: of what its verification drew; None where it has none.
    """

    file: str
    facts: Mapping[str, Any]
    result: Mapping[str, Any]
    seed: int | None


def sealed(contents: Mapping[str, Any]) -> dict[str, Any]:
    """What a lock's file has: `facts`, `result` and `seed`, and their hash."""
    return {MARK: VERSION, "digest": hash_of(contents), **contents}


def read_lock(path: str, *, key: str = "lock", origin: str = "") -> Locked:
    """Read a lock's file.

    Args:
        path: the file.
        key: the setting, or option, that names it, for errors.
        origin: where that stands.

    Raises:
        SettingsError: it cannot be read, is no lock, is another version's, or was changed after it
            was written.
    """
    data = read_json(path, key, origin, most=MAX_BYTES, what="lock", anew=ANEW)
    found = data.get(MARK) if isinstance(data, dict) else None
    if found is None:
        raise wrong(key, path, "is no lock of `vllm-fl plan --save`")
    if found != VERSION:
        problem = f"is a lock of version {found!r}, and this release reads version {VERSION}"
        raise wrong(key, path, f"{problem}: use the release that wrote it, or lock anew")
    contents = {name: data[name] for name in data if name not in (MARK, "digest")}
    if data.get("digest") != hash_of(contents):
        problem = "was changed after it was written: its digest does not fit"
        raise wrong(key, path, f"{problem}. {ANEW}")
    return Locked(path, **contents)
