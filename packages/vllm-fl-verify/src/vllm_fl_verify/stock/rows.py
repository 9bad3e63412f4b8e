"""The result of a comparison of stock vLLM: one row for each kind of layer and class."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

EXAMPLES = 3
"""Maximum number of problems in a row."""

RowKey = tuple[str, str, str]
"""Kind of layer, class of vLLM, and the other side of the comparison."""


@dataclass
class StockRow:
    """Comparisons of all layers of one kind that run one class.

    Args:
        layers: names of the compared layers.
        calls: number of compared calls.
        worst: maximum error relative to the tolerance; infinite without a tolerance.
        problems: layer -> its first problem.
        skipped: why some layers were not compared -> their names.
    """

    layers: set[str] = field(default_factory=set)
    calls: int = 0
    worst: float = 0.0
    problems: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, set[str]] = field(default_factory=dict)


class StockRows:
    """The rows of one rank."""

    def __init__(self) -> None:
        self.rows: dict[RowKey, StockRow] = {}

    def add(self, key: RowKey, layer: str, share: float, problem: str = "", calls: int = 1) -> None:
        """Add compared calls of a layer.

        Args:
            key: the row.
            layer: the layer's name.
            share: the maximum error relative to the tolerance.
            problem: a description if the result is incorrect.
            calls: number of calls.
        """
        row = self.rows.setdefault(key, StockRow())
        row.layers.add(layer)
        row.calls += calls
        row.worst = max(row.worst, math.inf if math.isnan(share) else share)
        if problem:
            row.problems.setdefault(layer, problem)

    def skip(self, key: RowKey, layer: str, why: str) -> None:
        """Report that a layer was not compared."""
        self.rows.setdefault(key, StockRow()).skipped.setdefault(why, set()).add(layer)

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                "kind": kind,
                "class": cls,
                "against": against,
                "layers": len(row.layers),
                "calls": row.calls,
                "worst": row.worst if math.isfinite(row.worst) else None,
                "incorrect": len(row.problems),
                "problems": [
                    f"layer {name}: {why}" for name, why in islice(row.problems.items(), EXAMPLES)
                ],
                "skipped": {why: len(layers) for why, layers in row.skipped.items()},
            }
            for (kind, cls, against), row in self.rows.items()
        ]
