"""What `vllm-fl report` reads: tables, and what `verify --json` and `coverage --json` printed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_fl.cli.common import SCHEMA, UsageError
from vllm_fl.settings.table import MAX_BYTES, Table, read_table
from vllm_fl.settings.values import read_text

__all__ = ["STATES", "Measured", "read"]

STATES = ("ok", "refused", "wrong", "raised")

RESULT = {
    "op": str,
    "impl_id": str,
    "dtype": str,
    "samples": dict.fromkeys(STATES, int),
    "worst": (float, None),
    "findings": [{"sample": str, "status": str, "share": (float, None), "reason": str}],
    "call": ({"sample": str, "microseconds": float, "calls": int}, None),
}
RUN = {
    "date": str,
    "environment": {
        "python": str,
        "system": str,
        "distributions": {...: str},
        "device": {"type": str, "name": str},
        "emulated": (str, None),
    },
    "results": [RESULT],
    "not_run": [{"op": str, "impl_id": str, "reason": str}],
}
COVERAGE = {
    "model": str,
    "mode": str,
    "digest": str,
    "device": str,
    "arguments": [str],
    "phases": [
        {
            "name": str,
            "of": str,
            "problem": str,
            "step_us": float,
            "total_us": float,
            "busy_us": float,
            "profiled_us": float,
            "remainder_us": float,
            "reached": {...: float},
            "rows": [
                {
                    "op": str,
                    "impl": str,
                    "name": str,
                    "reached": str,
                    "why": str,
                    "us": float,
                    "calls": float,
                    "share": float,
                }
            ],
        }
    ],
}
"""The part of a JSON that is shown. A tuple ending in None: or null; `...`: any name."""


@dataclass(frozen=True)
class Measured:
    """One file.

    Args:
        name: what the page calls it: the file's name, numbered where two have the same.
        table: what `vllm-fl tune` wrote, or None.
        run: what `vllm-fl verify --json` printed, or None.
        coverage: what `vllm-fl coverage --json` printed, or None.
    """

    name: str
    table: Table | None = None
    run: dict[str, Any] | None = None
    coverage: dict[str, Any] | None = None

    @property
    def kind(self) -> str:
        """What it is, in a word."""
        if self.table is not None:
            return "table"
        return "verification" if self.run is not None else "coverage"


def read(paths: Sequence[str]) -> list[Measured]:
    """The files in order.

    Raises:
        SettingsError: one cannot be read, or is a table that is not whole.
        UsageError: one is none of these.
    """
    names: dict[str, int] = {}
    found = []
    for path in paths:
        name = Path(path).name
        names[name] = names.get(name, 0) + 1
        shown = name if names[name] == 1 else f"{name} ({names[name]})"
        data = _json(path)
        if "vllm_fl_table" in data:
            found.append(Measured(shown, table=read_table(path, key="report", origin=path)))
        elif data.get("schema") == SCHEMA and "coverage" in data:
            for problem in _differences(data["coverage"], COVERAGE, "coverage"):
                raise _neither(path, problem)
            found.append(Measured(shown, coverage=data["coverage"]))
        else:
            found.append(Measured(shown, run=_run(path, data)))
    return found


def _json(path: str) -> dict[str, Any]:
    text = read_text(path, "report", path, most=MAX_BYTES)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        at = path if line is None else f"{path}:{line}"
        why = getattr(error, "msg", type(error).__name__)
        raise _neither(at, f"it is no whole JSON: {why}") from error
    if not isinstance(data, dict):
        raise _neither(path, f"it holds a {type(data).__name__}")
    return data


def _run(path: str, data: dict[str, Any]) -> dict[str, Any]:
    if data.get("schema") != SCHEMA or "results" not in data:
        found = f"schema {data['schema']!r}" if "schema" in data else "no schema"
        raise _neither(path, f"it has {found:.60} and {'' if 'results' in data else 'no '}results")
    for problem in _differences(data, RUN, ""):
        raise _neither(path, problem)
    return data


def _neither(where: str, why: str) -> UsageError:
    return UsageError(
        f"{where}: is neither a table that `vllm-fl tune` wrote nor the output of "
        f"`vllm-fl verify --json` or `vllm-fl coverage --json`: {why}"
    )


def _differences(value: Any, shape: Any, where: str) -> Iterable[str]:
    """Where `value` is not of `shape`, as one sentence each."""
    if isinstance(shape, tuple):
        if value is not None:
            yield from _differences(value, shape[0], where)
    elif isinstance(shape, dict):
        if not isinstance(value, dict):
            yield f"{where}: expected an object, got {value!r:.60}"
            return
        inner = shape.get(...)
        expected = dict.fromkeys(value, inner) if inner is not None else shape
        for name, kind in expected.items():
            at = f"{where}.{name}".lstrip(".")
            if name not in value:
                yield f"{at} is missing"
            else:
                yield from _differences(value[name], kind, at)
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield f"{where}: expected a list, got {value!r:.60}"
            return
        for number, item in enumerate(value):
            yield from _differences(item, shape[0], f"{where}[{number}]")
    else:
        kinds = (int, float) if shape is float else (shape,)
        if not isinstance(value, kinds) or isinstance(value, bool):
            yield f"{where}: expected {shape.__name__}, got {value!r:.60}"
