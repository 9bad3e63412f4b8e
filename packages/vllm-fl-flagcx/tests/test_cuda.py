"""The class for CUDA, on tensors in host memory; vLLM's part of it needs no GPU."""

from __future__ import annotations

import threading
from pathlib import Path

from test_collectives import compare, flagcx, joined, on_two  # skips without vLLM
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

from vllm_fl_flagcx import cuda
from vllm_fl_flagcx.cuda import FlagcxCudaCommunicator

__all__ = ["flagcx"]

PP = FlagcxCudaCommunicator, "pp:0"
"""A group other than `tp`, because vLLM's class needs a GPU for `tp`."""


def test_every_collective_gives_what_gloo_gives(tmp_path: Path, flagcx: Path) -> None:
    assert on_two(tmp_path, flagcx, compare, 60, *PP) == {0: "", 1: ""}


def leave(rank: int) -> list[bool]:
    """A library with a leave call that does not return, like NCCL while a captured graph exists."""
    it, graph = joined(*PP), threading.Event()
    cuda.LEAVING = 0.1
    call, left = it._flagcx.call, threading.Event()

    def waits(name: str, *arguments: object, **where: str) -> None:
        graph.wait(60)
        call(name, *arguments, **where)
        left.set()

    it._flagcx.call = waits
    it.destroy()
    while_it_lives = left.is_set()
    graph.set()
    return [while_it_lives, left.wait(60)]


def test_leaving_does_not_wait_for_graphs_that_the_caller_still_holds(
    tmp_path: Path, flagcx: Path
) -> None:
    assert on_two(tmp_path, flagcx, leave) == {0: [False, True], 1: [False, True]}


def test_every_method_of_vllms_class_is_ours_or_needs_no_collective() -> None:
    """For the installed vLLM: new methods must be implemented, or excluded on purpose."""
    experts = {"dispatch_router_logits", "dispatch", "combine"}
    experts |= {"allocate_combine_input", "combine_into_output"}
    # vLLM's kernels for peers on one machine; they return None if they are not created.
    kernels = {"custom_all_gather", "custom_reduce_scatter", "suspend", "resume"}
    theirs = {name for name, it in vars(CudaCommunicator).items() if callable(it)}
    theirs = {name for name in theirs if not name.startswith("_")}
    ours = {name for cls in FlagcxCudaCommunicator.__mro__[:2] for name in vars(cls)}
    assert theirs - ours <= experts | kernels
