"""A call in a captured graph: its Python runs once, and its kernels run at each replay."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["captured"]


def captured(run: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """Capture a call as vLLM captures a model: after it has run once on another stream.

    Args:
        run: the call; its arguments stay where they are.
        device: a CUDA device.

    Returns:
        (what replays the call, its result). Each replay writes the result anew, and has done so
        when it returns. The memory of the result is the graph's.

    Raises:
        Exception: the call cannot be captured; whatever torch or the call raises.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        gc.disable()  # an older graph that is freed meanwhile spoils the capture
        try:
            with torch.cuda.graph(graph, stream=stream):
                result = run()
        finally:
            gc.enable()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize(device)

    return replay, result
