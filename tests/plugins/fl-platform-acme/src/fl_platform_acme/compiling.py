"""Compiler that runs the vendor's pass manager on graphs and returns them uncompiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._inductor.compile_fx import graph_returns_tuple, make_graph_return_tuple
from vllm.compilation.compiler_interface import CompilerInterface
from vllm.compilation.passes.inductor_pass import get_pass_context
from vllm.compilation.passes.vllm_inductor_pass import VllmInductorPass

from .counting import CALLS


class AcmePassManager:
    """Not a subclass of a vLLM class; called with a graph's module."""

    def __init__(self) -> None:
        self.passes: list[VllmInductorPass] = []

    def __call__(self, graph: fx.GraphModule) -> fx.GraphModule:
        CALLS["graphs"] += 1
        compile_range = get_pass_context().compile_range
        for each in self.passes:
            if each.is_applicable_for_range(compile_range):
                each(graph)
        graph.recompile()
        return graph

    def add(self, each: VllmInductorPass) -> None:
        assert isinstance(each, VllmInductorPass)
        self.passes.append(each)

    def configure(self, config: Any) -> None:
        """No-op: this device has no passes."""


class AcmeCompiler(CompilerInterface):
    name = "AcmeCompiler"

    def compute_hash(self, vllm_config: Any) -> str:
        return "1.0"

    def compile(
        self,
        graph: fx.GraphModule,
        example_inputs: list[Any],
        compiler_config: dict[str, Any],
        compile_range: Any,
        key: str | None = None,
    ) -> tuple[Callable[..., Any] | None, Any]:
        def inner(graph: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
            return compiler_config["acme_passes"](graph)

        def compiled(graph: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
            # PyTorch's autograd cache supports only Inductor's output.
            with functorch_config.patch(enable_autograd_cache=False):
                return aot_autograd(fw_compiler=inner)(graph, example_inputs)

        if graph_returns_tuple(graph):
            return compiled(graph, example_inputs), None
        return make_graph_return_tuple(graph, example_inputs, compiled), None
