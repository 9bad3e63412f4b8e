"""Targets that we take: graphs of vLLM's compiler, on devices for which vLLM has no such pass.

These passes run behind vLLM's own (`passes.py`), before ops of vLLM's IR are lowered: so those are
still single nodes. Other parts of what is looked for are operators of ours there (`Plan.whole`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import fx
from vllm.compilation.passes.inductor_pass import InductorPass

from ...contracts.binding import new_node

if TYPE_CHECKING:
    from .state import Sites


class FindingPass(InductorPass):  # type: ignore[misc]
    """Puts an op's operator where the op's binding finds it.

    Args:
        fused: the op's operator, of the contract's schema.
        own: what finds it and puts the operator there: `FusionTarget.own`.
        sites: what is counted.
    """

    def __init__(
        self, fused: Callable[..., Any], own: Callable[[Any, Any, Any], bool], sites: Sites
    ) -> None:
        self.fused = fused
        self.own = own
        self.sites = sites

    def uuid(self) -> str:
        """Another one for other code and for another operator."""
        names = (__name__, new_node.__module__, self.own.__module__)
        modules = (sys.modules[module] for module in names)
        return str(self.hash_source(*map(inspect.getsource, modules), str(self.fused)))

    def __call__(self, graph: fx.Graph) -> None:
        self.sites.graphs += 1
        self.sites.found += sum(self.own(graph, node, self.fused) for node in list(graph.nodes))
