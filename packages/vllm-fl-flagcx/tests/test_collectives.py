"""Every collective on two processes, against torch.distributed's gloo, on random values."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import against_torch
import torch
import torch.distributed as dist
from flagcx_library import built
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

from vllm_fl_flagcx import library
from vllm_fl_flagcx.communicator import FlagcxCommunicator
from vllm_fl_verify.collectives import steps

CPU = torch.device("cpu")


def _rank(
    rank: int, folder: Path, flagcx: Path, body: Callable[..., Any], queue: Any, args: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    library.load_library(library.find(str(flagcx)))
    try:
        result = body(rank, *args)
    except BaseException as error:
        result = f"{type(error).__name__}: {error}"
    queue.put((rank, result))
    queue.close()
    queue.join_thread()
    os._exit(0)


@pytest.fixture(scope="module")
def flagcx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("flagcx"))


def on_two(folder: Path, flagcx: Path, body: Callable[..., Any], *args: Any) -> dict[int, Any]:
    """Results of `body(rank, *args)` on two processes, which must both live to its end."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    given = (folder, flagcx, body, queue, args)
    ranks = [context.Process(target=_rank, args=(rank, *given)) for rank in range(2)]
    for each in ranks:
        each.start()
    deadline = time.monotonic() + 300
    results: dict[int, Any] = {}
    while any(each.is_alive() for each in ranks) and time.monotonic() < deadline:
        while not queue.empty():
            results.update([queue.get()])
        time.sleep(0.01)
    assert [each.exitcode for each in ranks].count(None) == 0, "a rank hangs"
    while not queue.empty():
        results.update([queue.get()])
    return results


assert get_current_vllm_config_or_none() is None  # imported once, not by each process


def joined(cls: Any = FlagcxCommunicator, name: str = "tp:0") -> Any:
    group = dist.group.WORLD
    return cls(cpu_group=group, device=CPU, device_group=group, unique_name=name)


def compare(rank: int, count: int, *which: Any) -> str:
    """1 in 50 sizes is larger than the library's slot."""
    it = joined(*which)
    problems = against_torch.compare(it, rank, count, CPU, large=40_000, every=50)
    it.destroy()
    it.destroy()  # may be called twice
    return problems


@pytest.mark.slow
def test_every_collective_gives_what_gloo_gives(tmp_path: Path, flagcx: Path) -> None:
    assert on_two(tmp_path, flagcx, compare, 1000) == {0: "", 1: ""}


def refuse(rank: int) -> list[str]:
    """Wrong calls and their errors; the other rank must not be affected."""
    it = joined()
    calls: list[Callable[[], object]] = [
        lambda: it.all_reduce(torch.ones(2, dtype=torch.int16)),
        lambda: it.reduce_scatter(torch.ones(3, 2), 0),
        lambda: it.reduce_scatterv(torch.ones(3, 2), 0, [1, 1]),
        lambda: it.all_gatherv(torch.ones(3, 2), 1, [1, 2]),
        lambda: it.all_gatherv(torch.ones(3, 2), 0, [1, 2] if rank == 0 else [2, 1]),
        lambda: it.batch_isend_irecv([dist.P2POp(dist.irecv, torch.ones(2, 2).t(), 1 - rank)]),
        it.checkpoint_prepare,
        it.checkpoint_restore,
        lambda: it.dispatch(torch.ones(1), torch.ones(1), torch.ones(1)),
    ]
    said = []
    for call in calls:
        try:
            call()
            said.append("nothing")
        except (NotImplementedError, ValueError) as error:
            said.append(str(error))
    sound = it.all_reduce(torch.ones(1)).item() == 2.0  # the group still works
    return [*said, str(sound)]


def test_what_is_refused_is_refused_by_name(tmp_path: Path, flagcx: Path) -> None:
    for said in on_two(tmp_path, flagcx, refuse).values():
        words = "int16|3 rows cannot be split into 2 equal|parts of [1, 1]|got 1|got 3 rows, but"
        words += "|contiguous|checkpoint_prepare|checkpoint_restore|without experts|True"
        assert len(said) == 10
        for text, word in zip(said, words.split("|"), strict=True):
            assert word in text


def die(rank: int) -> str:
    os.environ["FLAGCX_TEST_SECONDS"] = "1"
    it = joined()
    it.all_reduce(torch.ones(4))
    if rank == 1:
        os._exit(7)
    return str(it.all_reduce(torch.ones(4)))


def test_a_rank_that_dies_ends_the_others_call(tmp_path: Path, flagcx: Path) -> None:
    results = on_two(tmp_path, flagcx, die)
    assert results == {
        0: "FlagcxError: flagcxAllReduce failed in group tp:0, rank 0: a rank is gone, or did not "
        "come (result 6)"
    }


def verify(rank: int) -> list[str]:
    every = steps(joined(), rank, 2, CPU, torch.bfloat16)
    return [why for _, step in every if (why := step())]


def test_it_passes_the_verification_at_start(tmp_path: Path, flagcx: Path) -> None:
    assert on_two(tmp_path, flagcx, verify) == {0: [], 1: []}


def test_a_wrong_library_does_not_pass_it(tmp_path: Path) -> None:
    wrong = built(tmp_path / "wrong", "-DWRONG")
    results = on_two(tmp_path, wrong, verify)
    assert results[0] == [] and "all_reduce of float32 [1, 1]: 1 of 1" in results[1][0]


def test_every_method_of_vllms_base_is_ours_or_needs_no_collective() -> None:
    """For the installed vLLM: new methods must be implemented, or refused by name."""
    left = {"allocate_combine_input", "combine_into_output", "suspend", "resume"}
    left |= {"prepare_communication_buffer_for_model"}
    base = {name for name, it in vars(DeviceCommunicatorBase).items() if callable(it)}
    base = {name for name in base if not name.startswith("_")}
    ours = {name for cls in FlagcxCommunicator.__mro__[:2] for name in vars(cls)}
    assert base - ours <= left
