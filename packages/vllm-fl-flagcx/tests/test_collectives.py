"""Every collective on two processes, against torch.distributed's gloo, on random values."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

import torch
import torch.distributed as dist
from flagcx_library import built
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

from vllm_fl.engine.collectives import steps
from vllm_fl_flagcx import library
from vllm_fl_flagcx.communicator import FlagcxCommunicator

CPU = torch.device("cpu")
SUMMED = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int64, torch.int32, torch.int8, torch.uint8),
)
MOVED = (*SUMMED, torch.bool, torch.int16, torch.float8_e4m3fn)

Report = Callable[[object], None]


def _rank(
    rank: int, folder: Path, flagcx: Path, body: Callable[..., Any], queue: Any, args: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    library.load(library.find(str(flagcx)))
    try:
        told = body(rank, *args)
    except BaseException as error:
        told = f"{type(error).__name__}: {error}"
    queue.put((rank, told))
    queue.close()
    queue.join_thread()
    os._exit(0)


@pytest.fixture(scope="module")
def flagcx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("flagcx"))


def on_two(folder: Path, flagcx: Path, body: Callable[..., Any], *args: Any) -> dict[int, Any]:
    """What `body(rank, *args)` gives on each of two processes that live to its end."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    given = (folder, flagcx, body, queue, args)
    ranks = [context.Process(target=_rank, args=(rank, *given)) for rank in range(2)]
    for each in ranks:
        each.start()
    deadline = time.monotonic() + 300
    told: dict[int, Any] = {}
    while any(each.is_alive() for each in ranks) and time.monotonic() < deadline:
        while not queue.empty():
            told.update([queue.get()])
        time.sleep(0.01)
    assert [each.exitcode for each in ranks].count(None) == 0, "a rank hangs"
    while not queue.empty():
        told.update([queue.get()])
    return told


assert get_current_vllm_config_or_none() is None  # imported once, and not by each process


def joined() -> Any:
    return FlagcxCommunicator(
        cpu_group=dist.group.WORLD, device=CPU, device_group=dist.group.WORLD, unique_name="tp:0"
    )


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random values; a sum of two of them rounds once, so that its bits are known."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return (4 * torch.randn(shape, generator=generator)).to(dtype)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


def same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    forms = [(each.shape, each.dtype) for each in (got, wanted)]
    return forms[0] == forms[1] and torch.equal(as_bytes(got), as_bytes(wanted))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)  # what is empty may have any stride
    return tensor.contiguous().flatten().view(torch.uint8)


def of_gloo(mine: torch.Tensor) -> torch.Tensor:
    """The sum, by gloo."""
    total = mine.clone()
    dist.all_reduce(total)
    return total


def gathered(mine: torch.Tensor, rows: list[int]) -> list[torch.Tensor]:
    """Both ranks' tensors, by gloo, as bytes."""
    found = []
    for src, count in enumerate(rows):
        part = mine if dist.get_rank() == src else mine.new_empty((count, *mine.shape[1:]))
        moved = as_bytes(part)
        dist.broadcast(moved, src)
        found.append(moved.view(mine.dtype).view(part.shape))
    return found


def compare(rank: int, count: int) -> str:
    """`count` sizes; every collective on each, in one dtype that sums and one that moves."""
    it, rng = joined(), random.Random(20261122)
    for case in range(count):
        summed, moved = SUMMED[case % len(SUMMED)], MOVED[case % len(MOVED)]
        most = 40_000 if case % 50 == 0 else 300  # more than the library's slot now and then
        rows, columns = 2 * rng.randint(1, 12), rng.randint(1, max(1, most // 12))
        uneven = [rng.randint(0, 5), rng.randint(1, 5)]
        dim, root = rng.choice([0, 1, -1]), rng.randint(0, 1)
        mine = drawn((rows, 2 * columns), summed, 2 * case + rank)
        if case % 3 == 0:
            mine = mine.t().contiguous().t()  # not contiguous
        wrong = []

        def check(name: str, got: Any, wanted: torch.Tensor, wrong: list[str] = wrong) -> None:
            if not isinstance(got, torch.Tensor) or not same(got, wanted):
                wrong.append(name)

        total = of_gloo(mine.contiguous())
        before = mine.clone()
        check("all_reduce", it.all_reduce(mine), total)
        check("all_reduce changed its input", mine, before)
        check("reduce_scatter", it.reduce_scatter(mine, dim), total.chunk(2, dim)[rank])
        whole = drawn((sum(uneven), columns), summed, 7 * case + rank)
        part = of_gloo(whole).split(uneven)[rank]
        check("reduce_scatterv", it.reduce_scatterv(whole, 0, uneven), part)
        into = torch.empty_like(part)
        it.reduce_scatterv_into_output(whole, into, 0, uneven)
        check("reduce_scatterv_into_output", into, part)

        mine = drawn((rows, columns), moved, 3 * case + rank)
        both = gathered(mine, [rows, rows])
        check("all_gather", it.all_gather(mine, dim), torch.cat(both, dim))
        got = it.gather(mine, root, dim)
        if rank == root:
            check("gather", got, torch.cat(both, dim))
        elif got is not None:
            wrong.append("gather where nothing is gathered")
        turned = mine.clone().t()
        check("broadcast", it.broadcast(turned, root), both[root].t())
        check("broadcast in place", turned, both[root].t())
        other = drawn((uneven[rank], columns), moved, 5 * case + rank)
        parts = gathered(other, uneven)
        check("all_gatherv", it.all_gatherv(other, 0, uneven), torch.cat(parts))
        for got in it.all_gatherv([other, other], 0, uneven):
            check("all_gatherv of a list", got, torch.cat(parts))
        if rank == root:
            it.send(mine)
        else:
            check("recv", it.recv(mine.shape, mine.dtype), both[root])
        received = torch.empty_like(mine)
        it.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine, 1 - rank),
                dist.P2POp(dist.irecv, received, 1 - rank),
            ]
        )
        check("batch_isend_irecv", received, both[1 - rank])
        if wrong:
            return f"case {case}, {summed} and {moved}, {rows}x{columns}, {uneven}: {wrong}"
    it.destroy()
    it.destroy()  # a second time does nothing
    return ""


def test_every_collective_gives_what_gloo_gives(tmp_path: Path, flagcx: Path) -> None:
    assert on_two(tmp_path, flagcx, compare, 1000) == {0: "", 1: ""}


def refuse(rank: int) -> list[str]:
    """What each wrong call says: nothing of it may reach the other rank."""
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
    sound = it.all_reduce(torch.ones(1)).item() == 2.0  # the group still serves
    return [*said, str(sound)]


def test_what_is_refused_is_refused_by_name(tmp_path: Path, flagcx: Path) -> None:
    for said in on_two(tmp_path, flagcx, refuse).values():
        words = "int16|3 rows do not make 2 equal|parts of [1, 1]|dimension 1|3 rows, where"
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
    told = on_two(tmp_path, flagcx, die)
    assert told == {
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
    told = on_two(tmp_path, wrong, verify)
    assert told[0] == [] and "all_reduce of float32 [1, 1]: 1 of 1" in told[1][0]


def test_every_method_of_vllms_base_is_ours_or_needs_no_collective() -> None:
    """Of this vLLM: what a newer one adds must be implemented, or refused by name."""
    left = {"allocate_combine_input", "combine_into_output", "suspend", "resume"}
    left |= {"prepare_communication_buffer_for_model"}
    base = {name for name, it in vars(DeviceCommunicatorBase).items() if callable(it)}
    base = {name for name in base if not name.startswith("_")}
    ours = {name for cls in FlagcxCommunicator.__mro__[:2] for name in vars(cls)}
    assert base - ours <= left
