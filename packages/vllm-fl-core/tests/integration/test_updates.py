"""After startup: updates of weights, sleeping and waking memory, and verification afterwards."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from builders import engine_of, extended, managing, planning, rank_failed, silu
from of_acme import silu_and_mul as right
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context

import vllm_fl.dispatch
from vllm_fl.engine.plan import Plan
from vllm_fl.errors import ServingError
from vllm_fl.integration import engines
from vllm_fl.integration.ranks import Opinion
from vllm_fl.integration.worker import PlannedWorker
from vllm_fl.plugins.inspection import FAILED, Moment, Objection
from vllm_fl.plugins.types import BackendImplKind, LinearKernelImpl
from vllm_fl_verify import quantised
from vllm_fl_verify.made_inputs import checks_of

KEY = "silu_and_mul", "vendor.acme"


class Model(torch.nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.bound, self.weight = plan.bind("silu_and_mul", self, frozenset()), torch.ones(32)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Any:
        return self.bound(torch.sin(input_ids[:, None] + self.weight).bfloat16())


class Runner:
    """The used part of vLLM's model runner."""

    execute_model_state: object = None

    def __init__(self, model: Model, config: VllmConfig) -> None:
        self.model, self.config = model, config
        self.runs = 0

    def _dummy_run(self, tokens: int, is_profile: bool = False, skip_eplb: bool = False) -> None:
        self.runs += 1
        zeros = torch.zeros(tokens, dtype=torch.int64)
        with set_forward_context(None, self.config, num_tokens=tokens):
            self.model(input_ids=zeros, positions=zeros)


Runner._dummy_run.__module__ = "vllm.stand_in"


class Worker:
    """The part of vLLM's worker for weights and memory."""

    model_runner: Runner
    seen: list[object]

    def reload_weights(self, fails: bool = False) -> str:
        self.seen.append(engines.calling_engine())
        if fails:
            raise OSError("no such file")
        self.model_runner.model.weight += 1
        return "loaded"

    def update_weights(self, update_info: object) -> None:
        raise OSError("the trainer is gone")

    def sleep(self, level: int = 1) -> None:
        pass

    def wake_up(self, tags: list[str] | None = None) -> None:
        pass

    def list_loras(self) -> set[int]:
        return {1}


Engine = Callable[..., Any]


def alone(what: str, mine: Any, failure: str = "") -> list[Any]:
    """The exchange of a single rank."""
    if failure:
        raise rank_failed(f"rank 0: {failure}")
    return [mine]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """`engine(fn)`: a worker with this kernel; `exchange` replaces that with other ranks."""

    def made(fn: Callable[..., Any] = right, *, exchange: Any = None, mode: Any = "eager") -> Any:
        config = VllmConfig()
        model_config = SimpleNamespace(get_vocab_size=lambda: 500, max_model_len=64)
        object.__setattr__(config, "model_config", model_config)
        manager = extended(managing(silu("vendor.acme", fn=lambda x: fn(x))))
        monkeypatch.setattr(vllm_fl.dispatch.manager, "manager", manager)
        plan = planning(manager, mode)
        worker: Any = object.__new__(type("Planned", (PlannedWorker, Worker), {}))
        worker.vllm_config, worker.rank, worker.device = config, 0, torch.device("cpu")
        worker.seen, worker.model_runner = [], Runner(Model(plan), config)
        worker.get_model = lambda: worker.model_runner.model
        engine = worker.vllm_fl_engine = engine_of(plan, worker)
        engine.is_loaded = True
        vars(engine.facts.settings)["preflight"] = "verify"
        checks_of(engine).live_counts = frozenset({8, 1})
        monkeypatch.setattr(engines, "exchange", exchange or alone)
        return worker

    return made


def keeping() -> Callable[[torch.Tensor], torch.Tensor]:
    """A kernel that caches its first result, like one with a weight cache keyed by address."""
    kept: dict[int, torch.Tensor] = {}

    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        return kept.setdefault(len(x), right(x)).clone()

    return silu_and_mul


def test_at_the_end_of_an_update_the_plan_is_compared_and_nothing_of_it_counts(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    worker = engine()
    with caplog.at_level(logging.INFO):
        assert worker.reload_weights() == "loaded"
    assert worker.model_runner.runs == 1 and worker.seen == [worker.vllm_fl_engine]
    assert "After the weights were updated: 1 calls on live tensors in" in caplog.text
    assert not worker.vllm_fl_engine.plan.calls and not worker.vllm_fl_engine.wrong
    assert worker.vllm_fl_verify().startswith("1 calls on live tensors in")
    checks_of(worker.vllm_fl_engine).live_counts = frozenset()  # all ops are in compiled graphs
    assert worker.vllm_fl_verify().startswith("no calls on live tensors: ")


def test_an_engine_that_plans_only_classes_of_quantised_layers_is_verified_after_an_update(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    impl = LinearKernelImpl("int8", "acme.Int8", BackendImplKind.VENDOR, "acme")
    worker, compared = engine(), []
    worker.vllm_fl_engine.plan = planning(managing(impl))
    checks_of(worker.vllm_fl_engine).live_counts = frozenset()
    seen = lambda engine, moment: compared.append(moment) or {}  # noqa: E731
    monkeypatch.setattr(quantised, "compare_layers_of_plan", seen)
    worker.reload_weights()
    assert compared == [Moment.UPDATED] and not worker.model_runner.runs


def test_who_keeps_what_it_made_of_old_weights_is_named_to_who_updates_them(engine: Engine) -> None:
    worker = engine(keeping())
    worker.vllm_fl_verify()
    with pytest.raises(ServingError) as failed:
        worker.reload_weights()
    error = failed.value
    assert (error.op, error.impl) == KEY and error.wrong.keys() == {KEY}
    assert "updated, verification failed for implementation 'vendor.acme'" in str(error)
    assert "VLLM_FL_PER_OP='silu_and_mul=stock'" in str(error) and "[FL504]" in str(error)
    assert float(worker.model_runner.model.weight[0]) == 2.0, "the new ones stay"
    assert worker.vllm_fl_engine.wrong.keys() == {KEY}
    worker.model_runner.model.weight -= 2
    worker.reload_weights()
    assert worker.vllm_fl_engine.wrong == {}, "of the last look"


def test_of_several_ranks_the_last_one_tells_the_caller(engine: Engine) -> None:
    """vLLM reads the ranks' answers in order, and leaves those after an error unread."""

    def exchange(what: str, mine: Any, failure: str = "") -> list[Any]:
        theirs = Opinion({KEY: Objection(FAILED, "it is wrong there")})
        return [mine, theirs if isinstance(mine, Opinion) else mine]

    worker = engine(exchange=exchange)
    parallel = worker.vllm_config.parallel_config
    object.__setattr__(parallel, "world_size", 2)
    assert worker.reload_weights() == "loaded"
    assert worker.vllm_fl_engine.wrong == {KEY: "it is wrong there (found on rank 1)"}
    worker.vllm_fl_engine.rank = 1
    with pytest.raises(ServingError, match="it is wrong there"):
        worker.reload_weights()


def test_an_update_that_fails_gives_vllms_own_error_and_the_next_is_verified(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    worker = engine()
    for update in (lambda: worker.reload_weights(fails=True), lambda: worker.update_weights({})):
        caplog.clear()
        with pytest.raises(OSError):
            update()
        (line,) = [r.message for r in caplog.records if "weight update failed" in r.message]
        assert "nothing was verified after it: rank 0: " in line
    assert engines.calling_engine() is None and worker.model_runner.runs == 0
    worker.reload_weights()
    assert worker.model_runner.runs == 1


def test_what_fails_on_another_rank_stops_the_look_on_this_one(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise rank_failed("rank 1: OSError: gone")

    worker = engine(exchange=fail)
    assert worker.reload_weights() == "loaded"
    assert worker.model_runner.runs == 0
    assert "nothing was verified: rank 1: OSError: gone" in caplog.text


def test_while_memory_is_asleep_the_look_waits(engine: Engine) -> None:
    worker = engine()
    worker.sleep(level=1)
    worker.wake_up()
    assert worker.model_runner.runs == 0, "the weights are what they were"
    worker.sleep(2)
    worker.wake_up(tags=["weights"])
    worker.reload_weights()
    assert worker.model_runner.runs == 0 and "kv_cache asleep" in worker.vllm_fl_verify()
    worker.wake_up(["kv_cache"])
    assert worker.model_runner.runs == 1
    worker.wake_up()
    assert worker.model_runner.runs == 1


def test_where_the_model_cannot_be_run_one_line_says_why(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    worker = engine()
    worker.model_runner.execute_model_state = object()
    assert "a step is still running" in worker.vllm_fl_verify()
    worker.model_runner.execute_model_state = None
    object.__setattr__(worker.vllm_config, "lora_config", SimpleNamespace())
    assert "adapters are loaded" in worker.vllm_fl_verify()
    object.__setattr__(worker.vllm_config, "lora_config", None)
    theirs = type("TheirRunner", (Runner,), {"_dummy_run": lambda runner, *args, **options: None})
    ours, worker.model_runner = worker.model_runner, object.__new__(theirs)
    assert "the dummy run of TheirRunner is not vLLM's" in worker.vllm_fl_verify()
    worker.model_runner = ours
    object.__setattr__(worker.vllm_config.parallel_config, "data_parallel_size", 2)
    assert "wait for each other" in worker.vllm_fl_verify()
    worker.reload_weights()
    assert worker.model_runner.runs == 0
    assert caplog.text.count("After the weights were updated, nothing was verified") == 1
