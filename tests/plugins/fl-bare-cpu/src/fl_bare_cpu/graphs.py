"""vLLM's breakable CUDA graphs on a CPU: replays a segment's operators without its Python."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Graph", "install"]


class Graph:
    """Replaces `torch.cuda.CUDAGraph`: records the operators between its begin and end."""

    recording: ClassVar[Graph | None] = None

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def capture_begin(self, **_: Any) -> None:
        Graph.recording = self

    def capture_end(self) -> None:
        Graph.recording = None

    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            if isinstance(result, torch.Tensor) and not torch._C._is_alias_of(again, result):
                result.copy_(again)


class _Recording(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        graph = Graph.recording
        result = func(*args, **(kwargs or {}))
        if graph is not None and graph is Graph.recording:  # no break has ended it already
            graph.calls.append((func, args, kwargs or {}, result))
        return result


def install() -> None:
    """Enable vLLM to capture such graphs in this process."""
    from vllm.compilation import breakable_cudagraph

    wrapper: Any = breakable_cudagraph.BreakableCUDAGraphWrapper
    capture = wrapper._capture

    def recording(*args: Any) -> Any:
        with _Recording():
            return capture(*args)

    wrapper._capture = recording
    torch.cuda.CUDAGraph = Graph  # type: ignore[misc, assignment]
    # A graph on a CPU owns no memory that must be released.
    for name in ("weak_ref_tensor", "weak_ref_tensors"):
        setattr(breakable_cudagraph, name, lambda tensors: tensors)
