"""The calling engine: from vLLM's forward context, or else from the thread's current call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from builders import engine_of, managing, planning, silu
from configs import engine_config
from vllm.forward_context import ForwardContext, override_forward_context

from vllm_fl.integration import engines
from vllm_fl.integration.engines import Engine
from vllm_fl.integration.worker import PlannedWorker


def engine(name: str = "vendor.a") -> Any:
    return engine_of(planning(managing(silu(name))))


@pytest.fixture
def two() -> Iterator[tuple[tuple[Engine, Any], tuple[Engine, Any]]]:
    """Two running engines: (engine, configuration) of each."""
    found = tuple((engine(name), engine_config()) for name in ("vendor.a", "vendor.b"))
    for each, config in found:
        each.begin(config)
    yield found  # type: ignore[misc]
    for each, _ in found:
        each.unbind()


def forward(config: Any) -> Any:
    layers = config.compilation_config.static_forward_context
    return override_forward_context(ForwardContext(layers, attn_metadata=None, slot_mapping={}))


def test_the_forward_context_precedes_the_threads_call_and_reaches_other_threads(two: Any) -> None:
    """vLLM's micro-batches run in threads that the worker's method never entered."""
    (first, one), (second, other) = two
    seen = []
    with engines.calling(second), forward(one):
        assert engines.calling_engine() is first
        thread = threading.Thread(target=lambda: seen.append(engines.calling_engine()))
        thread.start()
        thread.join()
        with forward(other):
            assert engines.calling_engine() is second
        assert engines.calling_engine() is first
    assert seen == [first] and engines.calling_engine() is None


def test_a_forward_pass_of_a_configuration_of_its_own_is_the_threads(two: Any) -> None:
    """A drafter's configuration, for example: only its worker's method is known."""
    (first, _), _ = two
    with forward(engine_config()):
        assert engines.calling_engine() is None
        with engines.calling(first):
            assert engines.calling_engine() is first


def test_an_engine_that_has_ended_calls_no_more() -> None:
    ended, config = engine(), engine_config()
    ended.begin(config)
    ended.unbind()
    with forward(config):
        assert engines.calling_engine() is None
    ended.unbind()  # a second shutdown


class Worker:
    """The part of vLLM's worker that runs the model."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def execute_model(self, scheduled: str, *, more: int = 0) -> tuple[str, int]:
        self.seen.append(engines.calling_engine())
        return scheduled, more

    def determine_available_memory(self) -> None:
        raise MemoryError

    def get_model(self) -> Any:
        return engines.calling_engine()


def test_the_workers_methods_that_run_the_model_call_for_its_engine() -> None:
    planned = type("Planned", (PlannedWorker, Worker), {})
    worker = object.__new__(planned)
    Worker.__init__(worker)
    worker.execute_model("early")
    worker.vllm_fl_engine = engine()
    given_back: list[str] = []
    worker.vllm_fl_engine.on_unbind(given_back.append, "the first")
    worker.vllm_fl_engine.on_unbind(given_back.append, "the last")
    worker.vllm_fl_engine.on_exit(lambda: 1 / 0)  # a plugin's error only costs a log line
    assert worker.execute_model("batch", more=2) == ("batch", 2)
    assert worker.seen == [None, worker.vllm_fl_engine] and not given_back
    with pytest.raises(MemoryError):
        worker.determine_available_memory()
    assert given_back == ["the last", "the first"], "a start that fails ends the engine"
    assert worker.get_model() is worker.vllm_fl_engine and engines.calling_engine() is None
    assert not hasattr(planned, "sample_tokens"), "vLLM asks workers what they have"
