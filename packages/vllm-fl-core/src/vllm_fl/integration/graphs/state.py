"""The passes over the graphs of one engine: their tasks, and counts of their results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...contracts.binding import GraphTarget
from ...dispatch.chain import Chain
from ...engine.ranges import Range

if TYPE_CHECKING:
    from ..engines import Engine


@dataclass
class Sites:
    """What a pass has done for one engine.

    Args:
        graphs: how many graphs it went through: 0 if all compiled code came from vLLM's cache.
        found: how many places it found in them.
    """

    graphs: int = 0
    found: int = 0


@dataclass(frozen=True)
class Sought:
    """An op that a pass of ours finds in graphs.

    Args:
        target: where it is found.
        chain: its candidates, by rows.
        operator: the op's operator, of the contract's schema.
    """

    target: GraphTarget
    chain: Chain
    operator: Callable[..., Any]


@dataclass
class InGraphs:
    """The passes over one engine's graphs.

    Attributes:
        sites: op -> what its pass has done.
        sought: the ops that our passes find.
        inlined: (op, range, impl id) -> how often its code replaced an operator in a graph.
        stayed: (op, range) -> in how many places of graphs the operator stayed.
    """

    sites: dict[str, Sites] = field(default_factory=dict)
    sought: list[Sought] = field(default_factory=list)
    inlined: Counter[tuple[str, Range, str]] = field(default_factory=Counter)
    stayed: Counter[tuple[str, Range]] = field(default_factory=Counter)


def in_graphs(engine: Engine) -> InGraphs:
    """Return the passes over an engine's graphs."""
    found: InGraphs = engine.state.setdefault(InGraphs, InGraphs())
    return found
