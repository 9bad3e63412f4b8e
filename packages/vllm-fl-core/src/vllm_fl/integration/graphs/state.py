"""The passes over the graphs of one engine: their tasks, and counts of their results."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...engine.ranges import Range

if TYPE_CHECKING:
    from ..engines import Engine


@dataclass
class Sites:
    """What a pass has done for one engine.

    Args:
        graphs: how many graphs it went through: 0 where all compiled code came from vLLM's cache,
            and nothing is known of what it found when that was filled.
        found: how many places it found in them.
        launched: in how many of these a traced form took the operator's place, whose kernels the
            graphs launch themselves.
    """

    graphs: int = 0
    found: int = 0
    launched: int = 0


@dataclass
class InGraphs:
    """The passes over one engine's graphs.

    Attributes:
        sites: op -> what its pass has done.
        passes: our passes that find ops.
        replaced: the ops that replace operators.
        inlined: (op, range, impl id) -> how often its code took an operator's place in a graph.
        stayed: (op, range) -> in how many places of graphs the operator stayed.
    """

    sites: dict[str, Sites] = field(default_factory=dict)
    passes: list[Any] = field(default_factory=list)
    replaced: list[Any] = field(default_factory=list)
    inlined: Counter[tuple[str, Range, str]] = field(default_factory=Counter)
    stayed: Counter[tuple[str, Range]] = field(default_factory=Counter)


def in_graphs(engine: Engine) -> InGraphs:
    """Return the passes over an engine's graphs."""
    found: InGraphs = engine.state.setdefault(InGraphs, InGraphs())
    return found
