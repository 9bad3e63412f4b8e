"""A call in a captured graph: its Python runs once, and its kernels run at each replay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import torch


def captured(run: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """Capture a call as vLLM captures a model: after it has run once on another stream.

    Args:
        run: the call; its arguments stay where they are.
        device: a CUDA device.

    Returns:
        (what replays the call, its result). Each replay writes the result anew, and has done so
        when it returns. The memory of the result is the graph's.

    Raises:
        Exception: the call cannot be captured; what it raised itself, where it did.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        raised: list[Exception] = []
        collects = gc.isenabled()
        gc.collect()
        gc.disable()  # an older graph that is freed meanwhile spoils the capture
        try:
            # In a block of its own, since the graph's does not leave the stream when it fails.
            with torch.cuda.stream(stream), torch.cuda.graph(graph, pool=pool, stream=stream):
                try:
                    result = run()
                except Exception as error:
                    raised.append(error)
                    raise
        except Exception as error:
            del graph
            _recover(pool)
            raise (raised or [error])[0] from None
        finally:
            if collects:
                gc.enable()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize(device)

    return replay, result


def _recover(pool: Any) -> None:
    """Let the device be used again after a capture that CUDA has ended with an error.

    Before 2.12 torch's allocator still counts the capture then, and raises when it is told to free
    memory (pytorch/pytorch#180395); and the device's generator, which a capture switches over,
    refuses to draw numbers until another capture has ended well.
    """
    device = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # torch has ended it itself
        torch._C._cuda_endAllocateToPool(device, pool)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device=device)
