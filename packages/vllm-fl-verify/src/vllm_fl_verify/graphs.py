"""Capture of a call in a CUDA graph: its Python code runs once, its kernels at each replay."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch


def captured(run: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """Capture a call as vLLM captures a model, after it has run once on a separate stream.

    Args:
        run: the call. Its arguments must keep their memory.

    Returns:
        (function that replays the call and waits for it, the call's result). The result is in
            memory of the graph, and each replay overwrites it.

    Raises:
        Exception: the call cannot be captured. An exception of the call itself is raised unchanged.
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
        gc.disable()  # freeing an older graph would invalidate the capture
        try:
            # In a separate block, because the graph's block does not leave the stream on failure.
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
    """Make the device usable again after a capture that failed with a CUDA error. Before 2.12,
    torch's allocator still counts the failed capture, and raises when it frees memory
    (pytorch/pytorch#180395). The device's random generator remains in capture mode, and draws no
    numbers until another capture has succeeded.
    """
    device = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # torch has ended the capture itself
        torch._C._cuda_endAllocateToPool(device, pool)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device=device)


@contextlib.contextmanager
def without_graphs(runner: Any) -> Iterator[None]:
    """Inside the block, vLLM's model runner replays no captured graphs.

    Batches are still padded to captured sizes.
    """
    with contextlib.ExitStack() as stack:
        for name in ("cudagraph_dispatcher", "cudagraph_manager"):  # older and newer runner
            dispatcher: Any = getattr(runner, name, None)
            if hasattr(dispatcher, "dispatch"):
                vars(dispatcher)["dispatch"] = partial(_uncaptured, dispatcher.dispatch)
                stack.callback(vars(dispatcher).pop, "dispatch")
        yield


def _uncaptured(dispatch: Callable[..., Any], *args: Any, **more: Any) -> Any:
    from vllm.config.compilation import CUDAGraphMode

    chosen = dispatch(*args, **more)
    if isinstance(chosen, tuple):
        return (CUDAGraphMode.NONE, *chosen[1:])
    # A full graph pads requests too, but attention without a graph accepts no padded ones.
    return dataclasses.replace(chosen, cg_mode=CUDAGraphMode.NONE, num_reqs=args[0])
