"""Layers that are left to vLLM while an engine runs, and forced tokens; without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from builders import engine_of, managing, planning, silu
from configs import engine_config
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.v1.sample.logits_processor import BatchUpdate

from vllm_fl.dispatch.context import building
from vllm_fl.engine.plan import Plan
from vllm_fl.integration import engines
from vllm_fl.integration.patchers.layers import FORWARDS, in_tables, ours
from vllm_fl_tools.integration.forcing import Forcing
from vllm_fl_tools.integration.leaving import Leaving
from vllm_fl_tools.integration.workload import FORCED

X = torch.randn(3, 8)
OURS, THEIRS = X[:, :4] + 5, torch.nn.functional.silu(X[:, :4]) * X[:, 4:]


@pytest.fixture(scope="module", autouse=True)
def layers() -> Iterator[None]:
    """What a worker does before it builds the model."""
    eager = VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))
    with set_current_vllm_config(eager), torch.no_grad(), in_tables(ours()):
        yield


class Worker(Leaving):
    """What vLLM's worker has, as far as layers are left in it."""

    def __init__(self, plan: Plan, model: torch.nn.Module) -> None:
        self.vllm_fl_engine, self.model = engine_of(plan), model

    def get_model(self) -> torch.nn.Module:
        return self.model


@pytest.fixture
def worker() -> Worker:
    """Of a model with three places for an activation, of which two share one."""
    plan = planning(managing(silu("vendor.acme", 5)))
    with building(plan):
        one, shared = SiluAndMul(), SiluAndMul()
    blocks = [torch.nn.ModuleDict({"act": act}) for act in (one, shared, shared)]
    return Worker(plan, torch.nn.ModuleDict({"layers": torch.nn.ModuleList(blocks)}))


def computed(worker: Worker) -> list[bool]:
    """Of the model's places, whether the plan's own computes there."""
    found = []
    for block in worker.model["layers"]:  # type: ignore[index]
        result = block["act"](X)
        is_ours = torch.equal(result, OURS)
        assert is_ours or torch.allclose(result, THEIRS)
        for forward in FORWARDS:  # some models call one by name
            try:
                assert torch.allclose(getattr(block["act"], forward)(X), result), forward
            except (AttributeError, NotImplementedError):
                assert not is_ours  # vLLM's own of another device
        found.append(is_ours)
    return found


def test_layers_have_their_names_and_are_told_where_they_are_shared(worker: Worker) -> None:
    assert worker.vllm_fl_layers_of("silu_and_mul") == {"layers.0.act": 1, "layers.1.act": 2}
    assert worker.vllm_fl_layers_of("rms_norm") == {}


def test_what_is_left_is_vllms_and_the_next_time_the_plans_again(worker: Worker) -> None:
    assert computed(worker) == [True, True, True]
    worker.vllm_fl_leave("silu_and_mul", ["layers.0.act"])
    assert computed(worker) == [False, True, True]
    worker.vllm_fl_leave("silu_and_mul", ["layers.1.act"])
    assert computed(worker) == [True, False, False]
    worker.vllm_fl_leave("silu_and_mul", ["layers.0.act", "layers.1.act"])
    assert computed(worker) == [False, False, False]
    worker.vllm_fl_leave("silu_and_mul", [])
    assert computed(worker) == [True, True, True]


def test_what_a_left_layer_calls_does_not_reach_the_plan(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel may be an operator that the plan overrides for everybody else."""
    seen = []

    def own(self: Any, x: torch.Tensor) -> torch.Tensor:
        seen.append(engines.now())
        return x

    config = engine_config()
    for forward in FORWARDS:
        monkeypatch.setattr(SiluAndMul, forward, own, raising=False)
    worker.vllm_fl_engine.begin(config)
    table = config.compilation_config.static_forward_context
    context = ForwardContext(table, attn_metadata=None, slot_mapping={})
    try:
        worker.vllm_fl_leave("silu_and_mul", ["layers.0.act"])
        with override_forward_context(context), engines.calling(worker.vllm_fl_engine):
            worker.model["layers"][0]["act"](X)  # type: ignore[index]
            assert seen == [None]
            assert engines.now() is worker.vllm_fl_engine
        with override_forward_context(context):
            assert engines.now() is worker.vllm_fl_engine
    finally:
        worker.vllm_fl_engine.unbind()


def test_forced_tokens_are_all_that_can_be_sampled() -> None:
    forcing = Forcing(VllmConfig(), torch.device("cpu"), False)
    assert not forcing.is_argmax_invariant()
    told, answered = SimpleNamespace(extra_args={FORCED: [4, 2]}), list[int]()
    free = SimpleNamespace(extra_args=None)
    added: Any = [(0, told, [1], answered), (1, free, [1], [])]
    forcing.update_state(BatchUpdate(2, [], added, []))
    for token in (4, 2):
        logits = torch.arange(12.0).reshape(2, 6)
        logits = forcing.apply(logits)
        assert logits.argmax(-1).tolist() == [token, 5]
        assert logits[0].isfinite().sum() == 1
        answered.append(token)
