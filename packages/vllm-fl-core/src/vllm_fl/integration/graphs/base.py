"""The base of our passes over graphs.

Imported where vLLM makes its pass manager, which is in a worker that compiles.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from vllm.compilation.passes.inductor_pass import InductorPass

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


class GraphPass(InductorPass):  # type: ignore[misc]
    """A pass over graphs, for one engine.

    Args:
        engine: the engine.
        vllm_config: the engine's configuration.

    Attributes:
        tasks: what the pass looks for. Without any it is not run.
    """

    tasks: Any

    def __init__(self, engine: Engine, vllm_config: VllmConfig) -> None:
        self.engine, self.config = engine, vllm_config
        self.tasks = self.find_tasks()

    def find_tasks(self) -> Collection[Any]:
        """Return what the pass looks for."""
        raise NotImplementedError

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
