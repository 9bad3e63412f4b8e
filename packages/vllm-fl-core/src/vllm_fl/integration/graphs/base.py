"""The base of vllm-fl's graph passes, imported only in a worker that compiles."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from vllm.compilation.passes.inductor_pass import InductorPass

from ..carried import digest_of
from .state import InGraphs, in_graphs

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ..engines import Engine

FUNCTIONAL = torch.ops.higher_order.auto_functionalized
"""The form in graphs of an operator that overwrites arguments. It returns the operator's results,
and a tensor for each overwritten argument."""


class GraphPass(InductorPass):  # type: ignore[misc]
    """A graph pass of one engine. It runs only if it has `tasks`: the operators or ops to find."""

    tasks: Any

    def __init__(self, engine: Engine, vllm_config: VllmConfig) -> None:
        self.engine, self.config = engine, vllm_config
        self.tasks = self.find_tasks()

    def find_tasks(self) -> Collection[Any]:
        raise NotImplementedError

    @property
    def done(self) -> InGraphs:
        return in_graphs(self.engine)

    def uuid(self) -> str:
        """Return the pass's key for compile caches: a hash of its source, and the plan's digest."""
        source = inspect.getsource(sys.modules[type(self).__module__])
        return f"{self.hash_source(source)}|{digest_of(self.config)}"
