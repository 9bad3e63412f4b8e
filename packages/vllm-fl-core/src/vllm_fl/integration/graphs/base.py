"""The base of our passes over graphs.

Imported where vLLM makes its pass manager, which is in a worker that compiles.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._inductor.pattern_matcher import (
    CallFunctionVarArgs,
    PatternMatcherPass,
    register_graph_pattern,
)
from vllm.compilation.passes.inductor_pass import InductorPass

from ...logs import get_logger
from ...text import quote
from ..carried import digest_of
from . import ranges
from .state import InGraphs, in_graphs

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ...engine.ranges import Range
    from ..engines import Engine

FUNCTIONAL = torch.ops.higher_order.auto_functionalized
"""An operator that writes over arguments is in graphs as this: it returns what the operator
returns, and a tensor for each argument that the operator writes over."""

OWNER = "vllm_fl"
"""Marks a node's code as an implementation's: a key next to the modules that it is of, which torch
passes on to the nodes that replace it. Its value is (op, impl id)."""

log = get_logger("engine")


def patterns(
    operators: Any, choose: Callable[[fx.Node], object | None], replace: Callable[..., None]
) -> PatternMatcherPass:
    """Return a pass that calls `replace` with the match of each operator for which `choose` does
    not return None."""
    found = PatternMatcherPass()
    register_graph_pattern(
        CallFunctionVarArgs(operators),
        extra_check=lambda match: choose(match.nodes[0]) is not None,
        pass_dict=found,
    )(replace)
    return found


class GraphPass(InductorPass):  # type: ignore[misc]
    """A pass over graphs, for one engine.

    Args:
        engine: the engine.
        vllm_config: the engine's configuration.

    Attributes:
        tasks: what the pass looks for. Without any it is not run.
    """

    tasks: Collection[Any] = ()

    def __init__(self, engine: Engine, vllm_config: VllmConfig) -> None:
        self.engine, self.config = engine, vllm_config

    @property
    def sizes(self) -> Range:
        """The token counts of the graph that is being compiled."""
        return ranges.now(self.config)

    @property
    def done(self) -> InGraphs:
        """What passes have done for the engine."""
        return in_graphs(self.engine)

    def uuid(self) -> str:
        """The key of the pass in the compiler's caches: its source, and the plan's digest."""
        source = inspect.getsource(sys.modules[type(self).__module__])
        return f"{self.hash_source(source)}|{digest_of(self.config)}"

    def put_code(
        self, node: fx.Node, op: str, impl_id: str, change: Callable[[], str | None]
    ) -> bool:
        """Replace an operator by an implementation's code; return whether that was done.

        Args:
            node: the operator.
            op, impl_id: the op, and the implementation.
            change: replaces it, or returns why not. It may raise anything: the operator, which
                then stays, computes the same.
        """
        modules = node.meta.get("nn_module_stack") or {}
        node.meta["nn_module_stack"] = {**modules, OWNER: (op, impl_id)}
        try:
            why = change() or ""
        except Exception as error:
            why = quote(error)
        if why:
            node.meta["nn_module_stack"] = modules
            log.warning(
                "Op '%s': graphs for %s tokens call an operator that runs '%s', which takes the "
                "host several times as long as its code in the graph: %s",
                op,
                self.sizes,
                impl_id,
                why,
            )
        return not why
