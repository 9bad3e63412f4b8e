"""The platform's pass manager with vllm-fl's passes added.

vLLM gets the class of its pass manager from the platform. A subclass of it adds the passes of the
plan before vLLM lowers its IR ops: `replacing.py` replaces operators with planned ops, and another
pass counts the operators that vLLM's passes inserted. This module is imported only in a worker that
compiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

from ...logs import get_logger
from ..engines import calling_engine
from ..patchers.fusions import fused_operators
from ..patchers.lookups import over_class, path_over
from . import ranges
from .base import FUNCTIONAL, GraphPass
from .replacing import TorchOperators

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PREFIX = "With:"

log = get_logger("engine")


def manager_path(stock: str) -> str:
    """Return the path of a subclass, with vllm-fl's passes, of the pass manager at the path
    `stock`."""
    return path_over(__name__, PREFIX, stock)


class FusedOperators(GraphPass):
    def find_tasks(self) -> dict[str, str]:
        return fused_operators(self.engine.plan)

    def __call__(self, graph: fx.Graph) -> None:
        sites = self.done.sites
        for op in {*self.tasks.values()}:
            sites[op].graphs += 1
        for node in graph.find_nodes(op="call_function", target=FUNCTIONAL):
            operator: Any = node.args[0]
            if operator.name() in self.tasks:
                sites[self.tasks[operator.name()]].found += 1


PASSES = (TorchOperators, FusedOperators)


class _WithOurPasses:
    """Changes to a pass manager: a mixin that precedes the platform's class."""

    def configure(self, config: VllmConfig) -> None:
        """Configure vLLM's passes, and append vllm-fl's after the passes that match IR ops."""
        super().configure(config)  # type: ignore[misc]
        engine = calling_engine()
        if engine is None or not ranges.is_compiled_by_range(config):
            return
        passes = [each for cls in PASSES if (each := cls(engine, config)).tasks]
        if hasattr(self, "add"):
            for each in passes:
                self.add(each)
        elif passes:  # a device plugin's manager
            log.warning(
                "%s does not accept additional passes (it has no add): ops that vllm-fl's passes "
                "insert into compiled graphs do not run",
                type(self).__mro__[2].__name__,
            )


def __getattr__(name: str) -> type:
    """Make the class of `manager_path` when vLLM imports it by its path."""
    return over_class(__name__, PREFIX, name, _WithOurPasses)
