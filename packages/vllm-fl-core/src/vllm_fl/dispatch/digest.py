"""The digest of a sealed plan: what compiled code depends on and vLLM's cache key does not see."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .plan import Plan
from .registry import Owner
from .types import AttentionImpl, OpImpl

__all__ = ["digest", "fingerprint"]


def fingerprint(plan: Plan, owners: Mapping[tuple[str, str], Owner]) -> dict[str, Any]:
    """What the plan consists of, as JSON-able data: two equal ones run the same code.

    Returns:
        `mode`, `strict` and per op the candidates, each with its distribution and the hash of the
        file that holds it.
    """
    return {
        "mode": plan.mode,
        "strict": plan.strict,
        "ops": {
            op: [
                {
                    "impl": impl.impl_id,
                    "distribution": str(owners.get((op, impl.impl_id), Owner("")).distribution),
                    "version": str(owners.get((op, impl.impl_id), Owner("")).version),
                    "source": _source(impl),
                }
                for impl in entry.candidates
            ]
            for op, entry in plan.entries.items()
        },
    }


def digest(facts: Mapping[str, Any]) -> str:
    """A short hash of JSON-able facts."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _source(impl: OpImpl | AttentionImpl) -> str:
    """The hash of the file that the implementation's code is in; its name where it has none."""
    code = impl.fn if isinstance(impl, OpImpl) else impl.class_path
    if isinstance(code, str):
        return _hash_of(_file_of(code.rpartition(".")[0]) or code)
    try:
        return _hash_of(inspect.getsourcefile(inspect.unwrap(code)) or repr(type(code)))
    except TypeError:
        return repr(type(code))


def _file_of(module: str) -> str | None:
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return None
    return spec.origin if spec else None


@cache
def _hash_of(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    except OSError:
        return path
