"""Times of a worker's steps, by PyTorch's profiler, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from builders import BoundLayer, managing, planning, refusing, silu
from vllm.config import CUDAGraphMode

from vllm_fl.engine.plan import Plan
from vllm_fl_tools.integration.profiling import Profiling, device_times

OP = "vllm-fl/op/silu_and_mul/vendor.acme"
X = torch.randn(3, 8)


class Act(BoundLayer):
    """Computes silu_and_mul, then exp."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).exp()


class Base:
    """The profiled part of vLLM's worker."""

    def __init__(self, plan: Plan) -> None:
        self.vllm_fl_engine = SimpleNamespace(plan=plan)
        self.layer, self.device = Act(plan), torch.device("cpu")
        self.graphs: list[Any] = []
        self.model_runner = SimpleNamespace(cudagraph_dispatcher=Dispatcher())
        self.vllm_config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context={}),
            parallel_config=SimpleNamespace(world_size=1),
        )

    def get_model(self) -> torch.nn.Module:
        return self.layer

    def execute_model(self, scheduled: Any) -> str:
        self.graphs.append(self.model_runner.cudagraph_dispatcher.dispatch(3))
        self.layer(X)
        return "done"


class Dispatcher:
    """Chooses a captured graph, and pads to it."""

    def dispatch(self, tokens: int) -> tuple[Any, int]:
        return CUDAGraphMode.FULL, tokens + 1


class Worker(Base, Profiling):
    """vLLM adds the methods after its own."""


def step(tokens: int = 1, *, prompt: bool = False, drafted: int = 0) -> Any:
    """A scheduler's output for a step of one sequence."""
    return SimpleNamespace(
        total_num_scheduled_tokens=tokens,
        scheduled_new_reqs=["a"] if prompt else [],
        num_scheduled_tokens={"a": tokens} if tokens else {},
        scheduled_spec_decode_tokens={"a": [1] * drafted} if drafted else {},
    )


@pytest.fixture
def worker() -> Worker:
    return Worker(planning(managing(silu("vendor.acme", 5))))


def seen(worker: Worker, *steps: Any, decode: bool = True, count: int = 4) -> Any:
    worker.vllm_fl_profile(decode, count)
    for scheduled in steps:
        assert worker.execute_model(scheduled) == "done"
    return worker.vllm_fl_profiled()


def calls(profile: Any) -> dict[tuple[str, ...], int]:
    """Path -> calls, of operators and labels."""
    return {tuple(profile["paths"][number]): n for number, _, n in profile["host"]}


def test_implementations_and_layers_are_labelled(worker: Worker) -> None:
    profile = seen(worker, *[step()] * 6)
    assert profile["problem"] == "" and profile["steps"] == 4
    found = calls(profile)
    assert found["vllm-fl/layer/Act", OP] == found["vllm-fl/layer/Act", "aten::exp"] == 4
    assert found["vllm-fl/layer/Act", OP, "aten::add"] == 4
    assert all(us >= 0 for _, us, _ in profile["host"])
    assert torch.equal(worker.layer(X), (X[:, :4] + 5).exp()) and worker.graphs


def test_only_steps_of_the_kind_are_seen(worker: Worker) -> None:
    """A prompt, its later chunks, and an empty step are not decoding."""
    others = [step(9, prompt=True), step(5), step(0)]
    profile = seen(worker, *others, *[step(3, drafted=2)] * 4, *others)
    assert sum(calls(profile).values()) and profile["steps"] == 4
    profile = seen(worker, *[step()] * 3, *[step(9, prompt=True)] * 4, step(), decode=False)
    assert profile["steps"] == 4
    assert seen(worker, step(9, prompt=True)) == {"steps": 0, "problem": ""}


def test_labelled_steps_run_no_captured_graph_and_keep_the_padding(worker: Worker) -> None:
    seen(worker, *[step()] * 6)
    modes = [mode for mode, tokens in worker.graphs if tokens == 4]
    assert modes == [CUDAGraphMode.NONE] * 4 + [CUDAGraphMode.FULL] * 2
    assert "execute_model" not in vars(worker)
    assert not vars(worker.model_runner.cudagraph_dispatcher)


def test_the_implementation_that_runs_after_a_refusal_is_labelled() -> None:
    impls = refusing("vendor.no", "never", priority=999), silu("vendor.acme", 5)
    worker = Worker(planning(managing(*impls)))
    profile = seen(worker, *[step()] * 5)
    assert calls(profile)["vllm-fl/layer/Act", OP] == 4


@pytest.mark.slow
def test_the_compiler_s_kernels_are_known_by_the_layers_in_them(worker: Worker) -> None:
    act, relu = torch.nn.SiLU(), torch.nn.ReLU6()
    compiled = torch.compile(torch.nn.Sequential(act, relu), fullgraph=True)
    with torch._inductor.config.patch(force_disable_caches=True), torch.no_grad():
        compiled(torch.randn(64, 64))
        worker.layer = compiled  # type: ignore[assignment]
        profile = seen(worker, *[step()] * 5)
    places = worker.vllm_fl_places()
    kernels = {path[-1] for path in calls(profile)} & {*places["kernels"]}
    assert kernels, (calls(profile), places["kernels"])
    assert {part for kernel in kernels for part in places["kernels"][kernel]} == {"SiLU", "ReLU6"}


def test_places_are_those_of_the_bindings(worker: Worker) -> None:
    places = worker.vllm_fl_places()
    assert places["layers"]["RMSNorm"] == "rms_norm"
    assert places["operators"]["_C::silu_and_mul"] == "silu_and_mul"
    assert places["operators"]["aten::mm"] == "linear"
    assert not {"aten::mul", "aten::sum"} & {*places["operators"]}, "many call them otherwise"
    assert places["device"] == "cpu" and places["ranks"] == 1


def event(name: str, start: float, end: float, device: str = "CUDA", note: bool = False) -> Any:
    return SimpleNamespace(
        name=name,
        device_type=SimpleNamespace(name=device),
        is_user_annotation=note,
        time_range=SimpleNamespace(start=start, end=end),
    )


def test_a_device_s_time_is_that_of_its_kernels() -> None:
    """The device's annotations and the host's events do not count; two kernels may overlap."""
    times, busy = device_times(
        [
            event("b", 4.0, 10.0),
            event("a", 0.0, 5.0),
            event("b", 20.0, 21.0),
            event("step", 0.0, 30.0, note=True),
            event("aten::mm", 0.0, 30.0, "CPU"),
        ]
    )
    assert times == {"a": [5.0], "b": [6.0, 1.0]} and busy == 11.0
