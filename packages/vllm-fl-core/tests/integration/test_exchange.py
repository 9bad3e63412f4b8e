"""Exchanges with ranks that are late, die before, or give up."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vllm_fl.errors import StartError
from vllm_fl.integration import exchange
from vllm_fl.integration.exchange import gathered
from vllm_fl.plugins.breadcrumb import noting

SIZE = 3
Rank = Callable[[int, Any], Any]


def _process(rank: int, folder: Path, code: Rank, answers: Any) -> None:
    torch.set_num_threads(1)
    os.environ["XDG_CACHE_HOME"] = str(folder)
    exchange.LOGGED_AFTER, exchange.CHECKED_EVERY = (0.4,), 0.1
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    exchange.log.addHandler(handler)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=SIZE)
    world = dist.new_group(backend="gloo")
    try:
        answer = code(rank, world)
    except RuntimeError as error:
        answer = str(error)
    answers.put((rank, answer, lines))
    answers.close()
    answers.join_thread()
    time.sleep(1)  # like a worker, which does not end at once
    os._exit(0)


def run(folder: Path, code: Rank, dies: int | None = None) -> tuple[dict[int, Any], list[str]]:
    """Run the code on three ranks: (rank -> its result or error, the logged lines)."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [context.Process(target=_process, args=(n, folder, code, answers)) for n in range(SIZE)]
    for each in ranks:
        each.start()
    found = [answers.get(timeout=100) for _ in range(SIZE - (dies is not None))]
    for each in ranks:
        each.join(100)
    assert [n for n, each in enumerate(ranks) if each.exitcode] == ([] if dies is None else [dies])
    return {rank: answer for rank, answer, _ in found}, [
        f"{rank}: {line}" for rank, _, lines in found for line in lines
    ]


def exchanged(rank: int, world: Any) -> list[int]:
    return gathered(rank, world, "agree")


def test_a_late_rank_is_logged_with_what_it_runs(tmp_path: Path) -> None:
    def late(rank: int, world: Any) -> list[list[int]]:
        exchanged(rank, world)
        if rank == 1:
            with noting("the first run of 'vendor.acme'", named=False):
                time.sleep(1)
        return [exchanged(rank, world) for _ in range(3)]

    results, lines = run(tmp_path, late)
    assert results == dict.fromkeys(range(SIZE), [[0, 1, 2]] * 3)
    (line,) = lines
    assert line.startswith("0: Rank 0 has waited ")
    assert " s for the other ranks to agree: rank 1 (process " in line
    assert line.endswith(") is still running the first run of 'vendor.acme'")


def test_a_rank_that_is_killed_ends_the_wait_at_once(tmp_path: Path) -> None:
    def killed(rank: int, world: Any) -> list[int]:
        exchanged(rank, world)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        try:
            return exchanged(rank, world)
        finally:
            assert time.monotonic() - began < 20

    results, _ = run(tmp_path, killed, dies=2)
    assert sorted(results) == [0, 1]
    for rank, text in results.items():
        assert text.startswith(f"vllm-fl: rank {rank} waited for the other ranks to agree, and ")
        assert "rank 2 (process " in text and " died. Its log" in text
        assert "rank 0 (" not in text and "rank 1 (" not in text


def test_a_time_out_says_that_the_late_rank_is_still_running(tmp_path: Path) -> None:
    def never(rank: int, world: Any) -> list[list[int] | str]:
        exchange.TIMEOUT = timedelta(seconds=1)
        exchanged(rank, world)
        if rank == 1:
            time.sleep(2.5)
        try:
            return [exchanged(rank, world)]
        except RuntimeError as error:
            exchange.TIMEOUT = timedelta(seconds=60)
            # All connections still work: the next exchange succeeds.
            return [str(error), exchanged(rank, world)]

    results, _ = run(tmp_path, never)
    for rank, (text, following) in results.items():
        assert text.startswith(f"vllm-fl: rank {rank} waited for the other ranks to agree, and ")
        assert "rank 1 (process " in text and ") is still running after 1 s" in text
        assert following == [0, 1, 2]
    assert "rank 1 (process " in results[1][0].partition(" gave up: ")[2]  # rank 0 may be late, too


def test_a_group_of_some_ranks_has_its_own_exchanges(tmp_path: Path) -> None:
    def some(rank: int, world: Any) -> tuple[list[int], list[int]]:
        group = dist.new_group([0, 2], backend="gloo")
        exchanged(rank, world)
        own = gathered(rank, group, "agree") if rank != 1 else [1]
        return own, exchanged(rank, world)

    results, _ = run(tmp_path, some)
    assert results == {0: ([0, 2], [0, 1, 2]), 1: ([1], [0, 1, 2]), 2: ([0, 2], [0, 1, 2])}


def test_the_store_keeps_no_old_keys(tmp_path: Path) -> None:
    def many(rank: int, world: Any) -> list[int]:
        keys = []
        for _ in range(5):
            exchanged(rank, world)
            keys.append(world.get_group_store().num_keys())
        return keys

    results, _ = run(tmp_path, many)
    assert max(max(keys[1:]) - min(keys[1:]) for keys in results.values()) <= SIZE


def test_a_failure_and_another_step_end_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's number is its rank in the world of all data-parallel engines."""
    group = SimpleNamespace(cpu_group=None)
    state = SimpleNamespace(get_world_group=lambda: group)
    for name in ("vllm", "vllm.distributed", "vllm.distributed.parallel_state"):
        monkeypatch.setitem(sys.modules, name, state)
    monkeypatch.setattr(exchange, "gathered", lambda mine, *_: [("a step", "", "theirs"), mine])
    assert exchange.exchange("a step", "mine") == ["theirs", "mine"]
    with pytest.raises(StartError, match="rank 1: boom") as failed:
        exchange.exchange("whatever", None, "boom")
    assert failed.value.failures == ("rank 1: boom",)
    with pytest.raises(StartError, match="rank 0: at a different step"):
        exchange.exchange("another step", "mine")
