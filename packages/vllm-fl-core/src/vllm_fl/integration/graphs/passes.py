"""vLLM's pass manager with our passes after its own.

vLLM asks its platform for the manager of the passes over a compiled graph. Ours is the platform's
own, and adds those that the plan of the compiling engine needs, before vLLM lowers the ops of its
IR: `replacing.py` replaces operators by planned ops, `lowering.py` inlines ops that are ordered by
size. A third pass counts the operators that vLLM's own passes found.

Imported where vLLM makes its pass manager, which is in a worker that compiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

from ...logs import get_logger
from ..engines import now
from ..patchers.fusions import fused_operators
from ..patchers.lookups import over_class, path_over
from . import ranges
from .base import FUNCTIONAL, GraphPass
from .lowering import RangeLowering
from .replacing import TorchOperators

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PREFIX = "With:"

log = get_logger("engine")


def manager_path(stock: str) -> str:
    """The path of a pass manager with our passes in it.

    Args:
        stock: the path of the platform's own.
    """
    return path_over(__name__, PREFIX, stock)


class FusedOperators(GraphPass):
    """Counts the operators that vLLM's passes put into graphs for planned ops."""

    def find_tasks(self) -> dict[str, str]:
        return fused_operators(self.engine.plan)

    def __call__(self, graph: fx.Graph) -> None:
        """Count the operators of one graph."""
        sites = self.done.sites
        for op in {*self.tasks.values()}:
            sites[op].graphs += 1
        for node in graph.find_nodes(op="call_function", target=FUNCTIONAL):
            operator: Any = node.args[0]
            if operator.name() in self.tasks:
                sites[self.tasks[operator.name()]].found += 1


PASSES = (TorchOperators, FusedOperators, RangeLowering)


class _WithOurPasses:
    """What we add to a pass manager. Mixed in before the platform's own."""

    def configure(self, config: VllmConfig) -> None:
        """As vLLM does; then ours, after the passes that look for ops of its IR."""
        super().configure(config)  # type: ignore[misc]
        engine = now()
        if engine is None or not ranges.is_compiled_by_range(config):
            return
        passes = [each for cls in PASSES if (each := cls(engine, config)).tasks]
        if hasattr(self, "add"):
            for each in passes:
                self.add(each)
        elif passes:  # a device's own
            log.warning(
                "%s takes no further pass (it has no add): what is ordered by size is inlined in "
                "no range, and stays operators",
                type(self).__mro__[2].__name__,
            )


def __getattr__(name: str) -> type:
    """Only a path travels to vLLM: the class is made from it on demand."""
    return over_class(__name__, PREFIX, name, _WithOurPasses)
