"""vLLM's pass manager with our passes behind its own.

vLLM asks its platform for the manager of the passes over a compiled graph. Ours is the platform's
own, and adds those that the plan of the compiling engine needs: first those that find a planned op
where vLLM has no pass for it (`finding.py`), then the one that puts planned ops in the
place of operators (`replacing.py`), the one that lets graphs launch kernels themselves
(`launching.py`), and the one that inlines what is ordered by size (`lowering.py`). All come before
vLLM lowers the ops of its IR. A pass of vLLM's that finds a planned op is run for the ranges of
sizes in which it is planned (`unfused.py`).

Imported where vLLM makes its pass manager, which is in a worker that compiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...logs import get_logger
from ..engines import now
from ..patchers.lookups import over_class, path_over
from . import ranges
from .launching import TracedForms
from .lowering import RangeLowering
from .replacing import TorchOperators
from .state import in_graphs
from .unfused import held_to_ranges

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


class _WithOurPasses:
    """What we add to a pass manager. Mixed in before the platform's own."""

    def configure(self, config: VllmConfig) -> None:
        """As vLLM does; then ours, after the passes that look for ops of its IR."""
        super().configure(config)  # type: ignore[misc]
        engine = now()
        if engine is None:
            return
        known = in_graphs(engine)
        passes = known.passes
        if ranges.is_compiled_by_range(config):
            if hasattr(self, "passes"):
                self.passes: list[Any] = held_to_ranges(self.passes, engine, config)
            if known.replaced:
                passes = [*passes, TorchOperators(engine, config)]
            launching, lowering = TracedForms(engine, config), RangeLowering(engine, config)
            passes = [*passes, *(each for each in (launching, lowering) if each.sites)]
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
