"""What vLLM does to a compiled graph, without the pass that needs vLLM's compiled operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.compilation.passes.vllm_inductor_pass import VllmInductorPass

if TYPE_CHECKING:
    from torch.fx import Graph
    from vllm.config import VllmConfig


class BareCpuPassManager(PostGradPassManager):
    def configure(self, config: VllmConfig) -> None:
        super().configure(config)
        # It asks for torch.ops._C.rotary_embedding in whatever graph.
        self.fix_functionalization = NoPass(config)


class NoPass(VllmInductorPass):
    def __call__(self, graph: Graph) -> None:
        pass
