"""A communicator is verified by every collective; each incorrect collective is reported by name."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from queue import Queue
from typing import Any

import pytest
import torch

from vllm_fl_verify.collectives import steps

CPU = torch.device("cpu")


class Meeting:
    """Where ranks, each a thread, exchange data."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=300)
        self.table: list[Any] = [None] * size
        pairs = itertools.product(range(size), repeat=2)
        self.mail: dict[Any, Queue[torch.Tensor]] = {pair: Queue() for pair in pairs}

    def exchange(self, rank: int, mine: Any) -> list[Any]:
        self.table[rank] = mine
        self.barrier.wait()
        all_of_them = [*self.table]
        self.barrier.wait()
        return all_of_them


class Communicator:
    """A correct communicator, over a meeting."""

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        self.rank, self.size, self.meeting = rank, size, meeting

    def _all(self, mine: Any) -> list[Any]:
        return self.meeting.exchange(self.rank, mine)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._all(x)).sum(0).to(x.dtype)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._all(x), dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return Communicator.all_reduce(self, x).chunk(self.size, dim)[self.rank]

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        return self._all(x)[src]

    def gather(self, x: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        found = torch.cat(self._all(x), dim)
        return found if self.rank == dst else None

    def send(self, x: torch.Tensor, dst: int | None = None) -> None:
        self.meeting.mail[self.rank, dst].put(x)

    def recv(self, size: torch.Size, dtype: torch.dtype, src: int | None = None) -> Any:
        return self.meeting.mail[src, self.rank].get(timeout=300)

    def all_gatherv(self, x: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        if isinstance(x, list):
            return [Communicator.all_gatherv(self, each, dim, sizes) for each in x]
        return torch.cat(self._all(x))

    def reduce_scatterv(self, x: torch.Tensor, dim: int = -1, sizes: Any = None) -> torch.Tensor:
        return Communicator.all_reduce(self, x).split(sizes)[self.rank]


def found(size: int, make: Callable[[int], Any], dtype: torch.dtype = torch.bfloat16) -> list[str]:
    """The ranks' faults as `name: why`: the first of each dtype."""
    problems: list[str] = []

    def run(rank: int, communicator: Any) -> None:
        problems.extend(
            filter(None, (step() for _, step in steps(communicator, rank, size, CPU, dtype)))
        )

    threads = [threading.Thread(target=run, args=(r, make(r))) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return problems


def ranks(size: int, **wrong: Any) -> Callable[[int], Any]:
    """`make(rank)` of correct communicators, with methods of the last one replaced."""
    meeting = Meeting(size)

    def make(rank: int) -> Any:
        it = Communicator(rank, size, meeting)
        for name, method in wrong.items() if rank == size - 1 else ():
            right = getattr(it, name)
            setattr(it, name, lambda *a, _m=method, _r=right, **k: _m(_r(*a, **k), *a))
        return it

    return make


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_right_one_has_no_fault(size: int, dtype: torch.dtype) -> None:
    assert found(size, ranks(size), dtype) == []


def off_by_one(result: Any, *args: Any) -> Any:
    if isinstance(result, list):
        return [off_by_one(each) for each in result]
    changed = result.clone()
    changed.view(-1)[-1] += 1
    return changed


EACH = "all_reduce all_gather reduce_scatter broadcast recv all_gatherv reduce_scatterv"


@pytest.mark.parametrize("name", EACH.split())
def test_one_wrong_element_on_one_rank_is_found(name: str) -> None:
    problems = found(2, ranks(2, **{name: off_by_one}))
    label = {"recv": "send and recv"}.get(name, name)
    assert problems and all(each.startswith(label) for each in problems)
    assert all(each.endswith("elements are incorrect") for each in problems)


@pytest.mark.parametrize(
    ("name", "wrong", "why"),
    [
        ("all_reduce", lambda result, x: x, "elements are incorrect"),  # not reduced
        ("all_reduce", lambda result, x: result.float(), "it returned float32 [1, 1], not "),
        ("all_gather", lambda result, x, dim: x, "it returned"),
        ("reduce_scatter", lambda result, x, dim: x.chunk(2, dim)[0], "elements are incorrect"),
        ("gather", lambda result, *a: torch.zeros(1), "a rank that is not the destination"),
        ("broadcast", lambda result, x, src: x, "elements are incorrect"),
        ("recv", lambda result, *a: None, "it returned NoneType, not a tensor"),
        ("all_reduce", lambda result, x: result * 0, "elements are incorrect"),
    ],
)
def test_what_a_wrong_library_does_is_found(name: str, wrong: Any, why: str) -> None:
    problems = found(2, ranks(2, **{name: wrong}))
    assert any(why in each for each in problems), problems


def test_what_vllms_base_refuses_may_be_refused() -> None:
    class Refusing(Communicator):
        def all_gatherv(self, *args: Any) -> Any:
            raise NotImplementedError

        reduce_scatterv = all_gatherv

    meeting = Meeting(2)
    assert found(2, lambda rank: Refusing(rank, 2, meeting)) == []
