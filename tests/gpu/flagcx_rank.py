"""One rank of the tests of FlagCX's communicator; prints a line of JSON for each case.

    python flagcx_rank.py RANK RANKS PART FOLDER FLAGCX_PATH DEVICE

With DEVICE `cuda` each rank uses the GPU of its number; with `cpu` nothing is captured.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[2] / "packages" / "vllm-fl-flagcx" / "tests"
sys.path.insert(0, str(TESTS))

import against_torch  # noqa: E402 (in that folder)
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from vllm.distributed.parallel_state import GroupCoordinator  # noqa: E402

from vllm_fl.integration.patchers.communicator import fault_of  # noqa: E402
from vllm_fl_flagcx import library  # noqa: E402
from vllm_fl_flagcx.communicator import FlagcxCommunicator  # noqa: E402
from vllm_fl_flagcx.cuda import FlagcxCudaCommunicator  # noqa: E402
from vllm_fl_verify.collectives import steps  # noqa: E402

SIZES = 60
ROWS = 8
UNEVEN = [3, 5, 1, 8, 2, 4, 7, 6]
"""Rows that each rank contributes; also the maximum number of ranks."""

FORMS = (
    *((torch.bfloat16, 1), (torch.bfloat16, 4096), (torch.bfloat16, 1_000_000)),
    *((torch.float32, 33), (torch.float32, 100_000), (torch.float16, 4096)),
    *((torch.int64, 33), (torch.int32, 33), (torch.int8, 33)),
)
"""(dtype, columns) of captured tensors."""

Cases = Iterator[tuple[str, Callable[[], str]]]
Call = Callable[[torch.Tensor], torch.Tensor]


def grouped(name: str, rank: int, device: str) -> GroupCoordinator:
    """vLLM's group of all ranks, with FlagCX's communicator."""
    ranks = [*range(dist.get_world_size())]
    group = GroupCoordinator([ranks], rank, dist.get_backend(), False, group_name=name)
    cls = FlagcxCudaCommunicator if device == "cuda" else FlagcxCommunicator
    group.device_communicator = cls(
        cpu_group=group.cpu_group,
        device=group.device,
        device_group=group.device_group,
        unique_name=group.unique_name,
    )
    return group


def collectives(rank: int, on: str) -> Cases:
    """Every collective against torch.distributed, then verified like at an engine's startup."""
    group = grouped("tp", rank, on)
    it, device = group.device_communicator, group.device
    large = 1_000_000 if on == "cuda" else 40_000
    yield (
        f"every collective, {SIZES} sizes",
        lambda: against_torch.compare(it, rank, SIZES, device, large=large, every=10),
    )
    for name, step in steps(it, rank, group.world_size, device, torch.bfloat16):
        yield f"verified as at start, {name}", lambda step=step: fault_of(step, device)[0]
    yield "leaving it", lambda: it.destroy() or ""  # type: ignore[func-returns-value]


def graphs(rank: int, on: str) -> Cases:
    """Each collective captured like in vLLM, and replayed with other values. On the CPU the smaller
    tensors are called without a graph, to test the comparison."""
    group = grouped("tp", rank, on)
    for dtype, columns in (form for form in FORMS if on == "cuda" or form[1] < 10_000):
        kind = str(dtype).removeprefix("torch.")
        yield (
            f"{'captured' if on == 'cuda' else 'called'}, {kind} [{ROWS}, {columns}]",
            lambda dtype=dtype, columns=columns: captured(group, rank, dtype, columns),
        )
    if on == "cuda":
        yield "leaving it while a captured graph lives", lambda: leaves(group)


def calls_of(it: Any, rank: int) -> dict[str, tuple[Call, Call]]:
    """Name -> (a collective, the same by torch.distributed), of a tensor of ROWS rows."""
    size = dist.get_world_size()
    behind, ahead = (rank - 1) % size, (rank + 1) % size
    mine, rows = UNEVEN[rank], UNEVEN[:size]

    def send_and_recv(x: torch.Tensor) -> torch.Tensor:
        if rank % 2 == 0:  # both calls block
            it.send(x, ahead)
        received = it.recv(x.shape, x.dtype, behind)
        if rank % 2:
            it.send(x, ahead)
        return received

    def both_ways(x: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(x)
        sends = dist.P2POp(dist.isend, x, ahead)
        it.batch_isend_irecv([sends, dist.P2POp(dist.irecv, received, behind)])
        return received

    def gather(x: torch.Tensor) -> torch.Tensor:
        found = it.gather(x, 0, -1)
        return x if found is None else found

    def every(x: torch.Tensor) -> list[torch.Tensor]:
        return against_torch.gathered(x, [x.shape[0]] * size)

    def uneven(x: torch.Tensor) -> list[torch.Tensor]:
        return against_torch.gathered(x[:mine], rows)

    def scattered(x: torch.Tensor) -> torch.Tensor:
        return it.reduce_scatterv(torch.cat([x] * size)[: sum(rows)], 0, rows)

    total = against_torch.total_of
    return {
        "all_reduce": (it.all_reduce, total),
        "two all_reduce": (
            lambda x: it.all_reduce(it.all_reduce(x) // 2),
            lambda x: total(total(x) // 2),
        ),
        "all_gather(0)": (lambda x: it.all_gather(x, 0), lambda x: torch.cat(every(x), 0)),
        "all_gather(-1)": (lambda x: it.all_gather(x, -1), lambda x: torch.cat(every(x), -1)),
        "reduce_scatter(0)": (
            lambda x: it.reduce_scatter(x, 0),
            lambda x: total(x).chunk(size, 0)[rank],
        ),
        "reduce_scatterv": (
            scattered,
            lambda x: torch.cat([total(x)] * size)[: sum(rows)].split(rows)[rank],
        ),
        "all_gatherv": (
            lambda x: it.all_gatherv(x[:mine], 0, rows),
            lambda x: torch.cat(uneven(x)),
        ),
        "all_gatherv of a list": (
            lambda x: torch.cat(it.all_gatherv([x[:mine]] * 2, 0, rows)),
            lambda x: torch.cat(uneven(x) * 2),
        ),
        "broadcast": (lambda x: it.broadcast(x.clone(), 1), lambda x: every(x)[1]),
        "gather": (gather, lambda x: (torch.cat(every(x), -1), x)[rank > 0]),
        "send and recv": (send_and_recv, lambda x: every(x)[behind]),
        "batch_isend_irecv": (both_ways, lambda x: every(x)[behind]),
    }


def captured(group: GroupCoordinator, rank: int, dtype: torch.dtype, columns: int) -> str:
    """The problem of a collective, run directly and in a graph, on four sets of values; or ""."""
    calls = calls_of(group.device_communicator, rank)

    def values(seed: int) -> torch.Tensor:
        return against_torch.drawn((ROWS, columns), dtype, 8 * seed + rank, group.device)

    given = values(0)
    faults = [
        f"{name}: not what NCCL gives"
        for name, (call, wanted) in calls.items()
        if not against_torch.same(call(given), wanted(given))
    ]
    if group.device.type == "cpu":
        return "; ".join(faults)
    torch.cuda.synchronize()
    held: dict[str, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
    with group.graph_capture() as context:
        for name, (call, _) in calls.items():
            graph = torch.cuda.CUDAGraph()
            # A thread of torch's groups queries events during the capture.
            with torch.cuda.graph(graph, stream=context.stream, capture_error_mode="thread_local"):
                result = call(given)
            held[name] = graph, result
    torch.cuda.synchronize()
    for seed in (1, 2, 3):
        given.copy_(values(seed))
        for name, (call, wanted) in calls.items():
            graph, result = held[name]
            graph.replay()
            replayed = result.clone()
            if not against_torch.same(replayed, wanted(given)):
                faults.append(f"{name}: replay {seed} is not what NCCL gives")
            if not against_torch.same(replayed, call(given)):
                faults.append(f"{name}: replay {seed} is not what a direct call gives")
    torch.cuda.synchronize()
    return "; ".join(faults)


def leaves(group: GroupCoordinator) -> str:
    """Leaving the group returns while a graph exists, and completes when the graph is deleted."""
    import threading

    it = group.device_communicator
    given = torch.ones(4, device=group.device)
    graph = torch.cuda.CUDAGraph()
    with (
        group.graph_capture() as context,
        torch.cuda.graph(graph, stream=context.stream, capture_error_mode="thread_local"),
    ):
        it.all_reduce(given)
    graph.replay()
    torch.cuda.synchronize()
    start = time.monotonic()
    it.destroy()
    beside = [each for each in threading.enumerate() if each.name.startswith("FlagCX leaves")]
    print(f"left in {time.monotonic() - start:.1f} s, still in {beside}", flush=True)
    graph.reset()
    for each in beside:
        each.join(20)
    return (
        "it is still being left, 20 s after the graph"
        if any(each.is_alive() for each in beside)
        else ""
    )


def main() -> None:
    """Run the cases of one part, each on all ranks at the same time."""
    rank, ranks = map(int, sys.argv[1:3])
    part, folder, flagcx, device = sys.argv[3], Path(sys.argv[4]), sys.argv[5], sys.argv[6]
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    library.load_library(library.find(flagcx))
    with (folder / f"{rank}.jsonl").open("w") as out:
        start = time.monotonic()
        for name, case in {"collectives": collectives, "graphs": graphs}[part](rank, device):
            try:
                problem = case()
            except Exception:  # one case must not hide the others
                problem = traceback.format_exc()
            result = {"case": name, "problem": problem, "seconds": time.monotonic() - start}
            print(json.dumps(result), file=out, flush=True)
            start = time.monotonic()
    if device == "cuda":
        torch.cuda.synchronize()
    os._exit(0)  # torch's groups may wait for a failing case


if __name__ == "__main__":
    main()
