"""The communicator's patcher: vLLM's groups on two processes, and incorrect candidates."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from builders import extended, managing, planning
from configs import engine_config
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.platforms import current_platform

import vllm_fl.dispatch
from vllm_fl.engine.facts import EngineFacts
from vllm_fl.engine.plan import make_plan
from vllm_fl.engine.start_line import line
from vllm_fl.errors import StartError
from vllm_fl.integration.engines import Engine
from vllm_fl.integration.patchers import communicator
from vllm_fl.integration.patchers.classes import class_of
from vllm_fl.integration.settling import settle
from vllm_fl.plugins.inspection import Moment
from vllm_fl.plugins.types import (
    COMMUNICATOR,
    BackendImplKind,
    CommunicatorImpl,
    CommunicatorRequest,
)
from vllm_fl.settings.loading import load_settings

KEY = ("communicator", "vendor.acme")
CPU = torch.device("cpu")

assert get_current_vllm_config_or_none() is None  # imported once, not by each process


class Sound(DeviceCommunicatorBase):
    """vLLM's gloo communicator under another name."""


class Doubling(Sound):
    """Incorrect on rank 1."""

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        reduced = super().all_reduce(input_)
        return reduced * 2 if self.rank == 1 else reduced


class Unmade(Sound):
    """Cannot be constructed on rank 1."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.rank == 1:
            raise OSError("no such device")


class Late(Sound):
    """Rank 1 arrives after the limit."""

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        if self.rank == 1:
            time.sleep(2)
        return super().all_reduce(input_)


class Dies(Sound):
    """Rank 1 ends its process in a collective."""

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        if self.rank == 1:
            os._exit(7)
        return super().all_reduce(input_)


class NoBase:
    pass


def acme(cls: Any, name: str = "acme", **fields: Any) -> CommunicatorImpl:
    path = f"{__name__}.{cls.__name__}" if isinstance(cls, type) else cls
    return CommunicatorImpl(f"vendor.{name}", path, BackendImplKind.VENDOR, name, **fields)


def facts(world: int = 2, **fields: Any) -> EngineFacts:
    settings = load_settings({})
    request = CommunicatorRequest(settings, "cpu", world, tensor_parallel_size=world, **fields)
    return EngineFacts(settings, "eager", dtype=torch.float32, communicator=request)


def use(monkeypatch: pytest.MonkeyPatch, *impls: CommunicatorImpl, **policy: Any) -> EngineFacts:
    """Install these and return the facts of an engine of two ranks."""
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(**globals()))
    manager = extended(managing(*impls, **policy))
    monkeypatch.setattr(vllm_fl.dispatch.manager, "manager", manager)
    found = facts()
    vars(found.settings)["policy"] = manager.policy
    return found


CASES: dict[str, tuple[tuple[CommunicatorImpl, ...], dict[str, Any]]] = {
    "sound": ((acme(Sound),), {}),
    "doubling": ((acme(Doubling),), {}),
    "unmade": ((acme(Unmade),), {}),
    "next": ((acme(Doubling), acme(Sound, "other")), {}),
    "strict": ((acme(Doubling),), {"strict": True}),
    "late": ((acme(Late),), {}),
    "dies": ((acme(Dies),), {}),
}
"""(installed communicators, policy). Order matters: ranks are unusable after the last ones."""


def _rank(rank: int, folder: Path, queue: Any) -> None:
    """One process: for each case, vLLM's groups, made as a worker makes them."""
    torch.set_num_threads(1)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(communicator, "stock_class", lambda: DeviceCommunicatorBase)
    platform: Any = type(current_platform)
    platform.get_device_communicator_cls = classmethod(lambda cls: communicator.FACTORY)
    parallel_state.init_distributed_environment(
        2, rank, f"file://{folder}/store", local_rank=rank, backend="gloo"
    )
    for case, (impls, policy) in CASES.items():
        monkeypatch.setattr(communicator, "LIMIT", 1.0 if case in ("late", "dies") else 120.0)
        engine = Engine(use(monkeypatch, *impls, **policy), rank)
        groups = engine.groups = communicator.Groups(engine)
        try:
            with communicator.made_by(groups):
                group = parallel_state.GroupCoordinator(
                    [[0, 1]], rank, "gloo", use_device_communicator=True, group_name=case
                )
                settle(engine, Moment.GROUPED)
            made = group.device_communicator
            reduced = float(made.all_reduce(torch.tensor([1.0 + rank])))
            queue.put((case, rank, type(made).__name__, groups.faults, reduced))
        except Exception as error:
            queue.put((case, rank, type(error).__name__, str(error), 0.0))
        if case == "late":
            time.sleep(2)  # until the late rank has arrived
    queue.close()
    queue.join_thread()
    os._exit(0)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[Any, ...]]]:
    """Case -> each rank's result: the communicator in use, the faults or the error, a sum."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    folder = tmp_path_factory.mktemp("ranks")
    processes = [context.Process(target=_rank, args=(rank, folder, queue)) for rank in range(2)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=300) for _ in range(2 * len(CASES) - 1)]  # minus the dead rank
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0, 7]
    return {
        case: [each[2:] for each in sorted(found, key=lambda each: each[1]) if each[0] == case]
        for case in CASES
    }


def test_what_is_planned_serves_in_the_groups_or_the_next_candidate(outcomes: Any) -> None:
    assert outcomes["sound"] == [("Sound", {}, 3.0)] * 2
    assert [serving for serving, _, _ in outcomes["next"]] == ["Sound", "Sound"]


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("doubling", "all_reduce of float32 [1, 1]: 1 of 1 elements are incorrect"),
        ("unmade", "its constructor failed for group unmade:0: OSError: no such device"),
    ],
)
def test_what_is_wrong_on_one_rank_is_off_on_both(
    outcomes: dict[str, Any], case: str, why: str
) -> None:
    assert outcomes[case] == [("DeviceCommunicatorBase", {KEY: (1, why, False)}, 3.0)] * 2


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("strict", ["in strict mode: rank 1: implementation 'vendor.acme' failed for op 'commu"]),
        ("late", ["did not return within 1 s", "VLLM_FL_PER_OP='communicator=stock'"]),
    ],
)
def test_strict_mode_and_a_rank_that_never_comes_end_the_start_on_every_rank(
    outcomes: dict[str, Any], case: str, words: list[str]
) -> None:
    assert [error for error, _, _ in outcomes[case]] == [StartError.__name__] * 2
    assert all(word in text for _, text, _ in outcomes[case] for word in words)


def test_a_rank_that_dies_is_reported_as_dead(outcomes: dict[str, Any]) -> None:
    ((error, text, _),) = outcomes["dies"]
    assert error == "RuntimeError"
    assert "verify their communicators, and rank 1 (process " in text and " died." in text


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("no_such_module.Communicator", "failed: ModuleNotFoundError"),
        (f"{__name__}.NoBase", "is not a subclass of vLLM's DeviceCommunicatorBase"),
        (lambda request: {}["library"], "its class path failed: KeyError"),
    ],
)
def test_a_class_that_cannot_be_used_says_why(
    path: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(communicator, "stock_class", lambda: DeviceCommunicatorBase)
    groups = communicator.Groups(Engine(use(monkeypatch, acme(path)), 0))
    impl = groups.communicators[0]
    assert why in class_of(impl, COMMUNICATOR, groups.request, communicator.problem_of)[2]


def test_an_unsupported_communicator_is_reported_and_is_not_a_candidate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[CommunicatorRequest] = []
    found = use(monkeypatch, acme(Sound, supports=lambda r: bool(asked.append(r)) or "no library"))
    why_not = communicator.Communicator().why_not
    assert why_not(found).impls == {KEY: "does not support this engine: no library"}
    assert communicator.Groups(Engine(found, 0)).communicators == ()
    assert asked[0].settings is found.settings
    sound = use(monkeypatch, acme(Sound))
    assert len(communicator.Groups(Engine(sound, 0)).communicators) == 1
    invariant = replace(sound, batch_invariant=True)  # which cannot be measured
    assert communicator.Groups(Engine(invariant, 0)).communicators == ()
    elastic = replace(sound, communicator=facts(elastic=True).communicator)
    assert "elastic expert parallelism" in why_not(elastic).ops["communicator"]
    with communicator.Communicator().opening(engine := Engine(elastic, 0)):
        assert engine.groups is None


def test_an_engine_of_one_rank_has_no_communicator() -> None:
    settings = load_settings({})
    request = communicator.Communicator().request
    assert request(engine_config(), settings, compiled=False) == {"communicator": None}
    two = engine_config(tensor_parallel_size=2)
    found = request(two, settings, compiled=True)["communicator"]
    assert found is not None and (found.world_size, found.compiled) == (2, True)


def test_the_plan_has_it_where_there_are_ranks() -> None:
    manager = managing(acme(Sound))
    assert "communicator" not in planning(manager).entries
    found = facts()
    vars(found.settings)["policy"] = manager.policy
    plan = make_plan(manager, found)
    assert "communicator=vendor.acme" in line(plan)
    off = make_plan(manager, found, demoted={KEY: "failed at startup on rank 1: wrong"})
    assert off.entries["communicator"].label == "stock"
    assert "failed at startup on rank 1" in off.entries["communicator"].reason


def test_a_step_that_raises_or_never_ends_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends() -> str:
        raise SystemExit("the library gave up")

    assert communicator.fault_of(ends, CPU) == ("SystemExit: the library gave up", False)
    assert communicator.fault_of(lambda: None, CPU) == ("", False)
    monkeypatch.setattr(communicator, "LIMIT", 0.05)
    never = threading.Event()
    try:
        fault = communicator.fault_of(lambda: str(never.wait(20)), CPU)
        assert fault == ("it did not return within 0.05 s", True)
    finally:
        never.set()
