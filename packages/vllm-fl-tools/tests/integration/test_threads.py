"""With how many threads vLLM's worker computes on a CPU, by the variables of the engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from unittest import mock

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from vllm.platforms import current_platform

from vllm_fl_tools.integration.threads import worker_threads

if not current_platform.is_cpu():
    pytest.skip("this vLLM is not for CPUs", allow_module_level=True)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """vLLM sets variables of the process as it makes a configuration."""
    with mock.patch.dict(os.environ):
        os.environ.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        yield


@pytest.mark.parametrize(
    ("bind", "threads"),
    [("0-2", 3), ("5,0-1", 3), ("0-1|2-4", 2), ("nobind", None)],
)
def test_it_is_what_vllm_binds_the_first_rank_to(bind: str, threads: int | None) -> None:
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = bind
    os.environ["OMP_NUM_THREADS"] = "7"  # vLLM sets its own for a worker that it binds
    assert worker_threads() == threads


def test_by_default_it_is_vllms_own_count_and_nothing_here_is_bound() -> None:
    os.environ.pop("VLLM_CPU_OMP_THREADS_BIND", None)
    before = os.sched_getaffinity(0)
    threads = worker_threads()
    assert threads is not None
    # Where there is more than one core, one is kept for the scheduler.
    assert 1 <= threads <= max(len(before) - 1, 1)
    assert os.sched_getaffinity(0) == before


def test_an_engine_without_worker_processes_is_not_bound() -> None:
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "0-2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    assert worker_threads() is None


def test_what_vllm_cannot_read_is_its_error() -> None:
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "some"
    with pytest.raises(ValueError, match="some"):
        worker_threads()
