"""Tasks and results of the passes over one engine's graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...contracts.binding import GraphTarget
from ...dispatch.chain import Chain

if TYPE_CHECKING:
    from ..engines import Engine


@dataclass
class Sites:
    """The results of a pass for one op: the number of graphs that it processed (0 if vLLM's cache
    had all compiled code), and the number of matches that it found in them."""

    graphs: int = 0
    found: int = 0


@dataclass(frozen=True)
class Sought:
    """An op that a pass of vllm-fl finds in graphs by its target. `operator` is the op as a torch
    operator with the contract's schema."""

    target: GraphTarget
    chain: Chain
    operator: Callable[..., Any]


@dataclass
class InGraphs:
    """Tasks and results of the passes of one engine."""

    sites: dict[str, Sites] = field(default_factory=dict)
    sought: list[Sought] = field(default_factory=list)


def in_graphs(engine: Engine) -> InGraphs:
    """Return the engine's `InGraphs`. The first call creates it."""
    found: InGraphs = engine.state.setdefault(InGraphs, InGraphs())
    return found
