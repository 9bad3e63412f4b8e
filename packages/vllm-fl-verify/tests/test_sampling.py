"""Sampled steps of a stand-in worker: eager while they run, unchanged afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from builders import engine_of, managing, planning, silu
from configs import engine_config
from of_acme import silu_and_mul as right
from vllm.config import CompilationMode, CUDAGraphMode

from vllm_fl.engine.facts import EngineFacts
from vllm_fl.errors import SettingsError
from vllm_fl.settings.loading import load_settings
from vllm_fl_verify import sampling as module
from vllm_fl_verify.made_inputs import checks_of

OP = "silu_and_mul"


class Model(torch.nn.Module):
    """Two modules that vLLM compiles, and one excluded from compilation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(3))
        for layer, is_left in zip(self.layers, (False, False, True), strict=True):
            layer.do_not_compile = is_left


class Worker:
    """The used part of vLLM's worker; each step calls the plan's function once."""

    def __init__(self, *, fn: Any = right, mode: Any = None, graphs: Any = None, **env: str):
        settings = load_settings(env)
        self.vllm_config = engine_config(mode=mode)
        self.vllm_config.compilation_config.cudagraph_mode = graphs or CUDAGraphMode.NONE
        manager = managing(silu("vendor.acme", fn=fn), per_op_order={OP: ["vendor"]})
        self.plan = planning(manager, "eager")
        self.call = self.plan.bind(OP, object(), frozenset())
        self.model = Model()
        self.engine = engine_of(self.plan, self)
        self.engine.facts = EngineFacts(settings, "eager", dtype=torch.bfloat16)
        dispatcher = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL)
        self.model_runner = self.runner(cudagraph_dispatcher=dispatcher)
        self.states: list[tuple[Any, ...]] = []
        self.error: Exception | None = None

    def get_model(self) -> Any:
        return self.model

    @property
    def state(self) -> tuple[Any, ...]:
        runner = self.model_runner
        if hasattr(runner, "cudagraph_manager"):
            return (getattr(runner.cudagraph_manager, "_graphs_captured", None),)
        left = [layer.do_not_compile for layer in self.model.layers]
        return runner.cudagraph_dispatcher.cudagraph_mode.name, *left

    def runner(self, **fields: Any) -> Any:
        return SimpleNamespace(execute_model=self.run, **fields)

    def run(self, scheduler_output: Any, *_: Any, **__: Any) -> str:
        self.states.append(self.state)
        self.call(torch.randn(4, 16))
        if self.error is not None:
            raise self.error
        return "output"

    def execute_dummy_batch(self) -> None:
        pass


def watched(worker: Worker) -> Any:
    return module.start_sampling(worker.engine)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "vllm_fl.engine"]


def step(worker: Worker, tokens: int = 4, **options: Any) -> str:
    output = SimpleNamespace(total_num_scheduled_tokens=tokens)
    answer: str = worker.model_runner.execute_model(output, None, **options)
    return answer


def test_a_worker_without_the_setting_stays_as_it_is() -> None:
    worker = Worker()
    before = dict(vars(worker)), dict(vars(worker.model_runner))
    assert watched(worker) is None
    assert (vars(worker), vars(worker.model_runner)) == before


def test_sampled_steps_are_eager_and_compared_and_the_others_are_not() -> None:
    worker = Worker(VLLM_FL_SHADOW="0.25")
    canary = watched(worker)
    before = worker.state
    assert {step(worker) for _ in range(100)} == {"output"}
    eager = ("NONE", True, True, True)
    assert before == worker.state == ("FULL", False, False, True)
    sampled = canary.shadow.sampled
    assert sampled == pytest.approx(25, abs=1)
    assert worker.states.count(eager) == sampled
    assert worker.states.count(before) == 100 - sampled
    report = canary.shadow.report()
    assert report["compared"][OP]["vendor.acme"]["4"]["calls"] == sampled


def test_a_step_without_tokens_and_another_replicas_step_are_not_sampled() -> None:
    worker = Worker(VLLM_FL_SHADOW="1")
    canary = watched(worker)
    step(worker, tokens=0)
    step(worker, dummy_run=True)
    worker.execute_dummy_batch()
    assert (canary.shadow.steps, canary.shadow.sampled) == (1, 0)
    assert worker.states == [worker.state, worker.state]


def test_a_step_that_raises_leaves_everything_as_it_was() -> None:
    worker = Worker(VLLM_FL_SHADOW="1")
    watched(worker)
    before, worker.error = worker.state, RuntimeError("boom")
    with pytest.raises(RuntimeError, match="boom"):
        step(worker)
    assert worker.state == before != worker.states[0]


def test_the_second_model_runner_takes_no_captured_graph() -> None:
    worker = Worker(graphs=CUDAGraphMode.FULL, VLLM_FL_SHADOW="1")
    worker.model_runner = worker.runner(cudagraph_manager=None)  # until the KV cache is known
    watched(worker)
    worker.model_runner.cudagraph_manager = SimpleNamespace(_graphs_captured=True)
    step(worker)
    assert (worker.states, worker.state) == ([(False,)], (True,))


@pytest.mark.parametrize("what", ["mode", "runner", "no runner", "micro-batches", "model"])
def test_where_no_step_can_be_eager_one_line_says_why(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    mode = CompilationMode.STOCK_TORCH_COMPILE if what == "mode" else None
    worker = Worker(mode=mode, graphs=CUDAGraphMode.FULL, VLLM_FL_SHADOW="0.5")
    if what == "runner":
        worker.model_runner = worker.runner()
    if what == "no runner":
        worker.model_runner = SimpleNamespace()
    if what == "micro-batches":
        worker.vllm_config.parallel_config.use_ubatching = True
    if what == "model":
        worker.model = None  # type: ignore[assignment]
    before = dict(vars(worker.model_runner))
    assert watched(worker) is None and vars(worker.model_runner) == before
    (line,) = said(caplog)
    assert line.startswith("VLLM_FL_SHADOW=0.5: no step is sampled: ")


@pytest.mark.parametrize("text", ["2", "-1", "a", "nan", "1e400"])
def test_a_rate_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="a fraction from 0 to 1"):
        load_settings({"VLLM_FL_SHADOW": text})


def test_an_error_is_said_at_once_with_its_name_and_then_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    caplog.set_level("INFO", logger="vllm_fl")
    worker = Worker(fn=lambda x: right(x) + 0.25, VLLM_FL_SHADOW="1")
    canary = watched(worker)
    step(worker)
    assert checks_of(worker.engine).verdicts.is_void
    (line,) = said(caplog)
    assert "'vendor.acme' of op 'silu_and_mul' is incorrect in 1 of 1 compared calls of" in line
    assert "up to 4 tokens" in line
    for _ in range(2):
        step(worker)
    assert len(said(caplog)) == 1
    clock[0] += 61
    step(worker)
    assert "incorrect in 3 of 3 compared calls" in said(caplog)[1]
    step(worker)
    monkeypatch.undo()
    canary.say()
    assert "incorrect in 1 of 1" in said(caplog)[2]
