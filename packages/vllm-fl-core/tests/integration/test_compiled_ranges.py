"""One layer, compiled by range by vLLM itself, without an engine: what runs, what is cached."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from builders import engine_of, half, managing, planning, silu
from vllm.compilation import backends
from vllm.compilation.counter import compilation_counter
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context

from vllm_fl.engine.digest import digest, fingerprint
from vllm_fl.engine.plan import leave_place, take_place
from vllm_fl.engine.ranges import Range
from vllm_fl.integration import passes
from vllm_fl.integration.planning import apply, seal
from vllm_fl.integration.serving import calling

OP = "silu_and_mul"
LARGEST = 256
RUN = uuid.uuid4().hex
"""In the plans' digests: Inductor's cache outlives the tests, and must not know their graphs."""
STOCK_MANAGER = "vllm.compilation.passes.pass_manager.PostGradPassManager"


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A platform on which vLLM has our pass, and a cache of vLLM's that is empty at first."""
    manager = classmethod(lambda cls: passes.manager_path(STOCK_MANAGER))
    platform: Any = type(backends.current_platform)
    monkeypatch.setattr(platform, "get_pass_manager_cls", manager)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "vllm"))
    yield
    torch._dynamo.reset()


@dataclass(frozen=True)
class Served:
    """What a layer did that was compiled for an order by size.

    Args:
        marks: what it added to half of x, by the token count of the call.
        inlined: as `Serving.inlined` says.
        compilations: for how many ranges vLLM compiled it, from its caches or not.
    """

    marks: dict[int, int]
    inlined: Counter[tuple[str, Range, str]]
    compilations: int


def served(order: Any) -> Served:
    """A layer that is compiled and called as in an engine whose settings order its op so."""
    config = VllmConfig(
        compilation_config=CompilationConfig(mode=CompilationMode.VLLM_COMPILE, backend="inductor")
    )
    compilation = config.compilation_config
    compilation.mode = CompilationMode.VLLM_COMPILE  # which vLLM's CPU platform has changed
    compilation.compile_sizes = []
    config.scheduler_config.max_num_batched_tokens = LARGEST
    compilation.compile_ranges_endpoints = [LARGEST]
    impls = (silu("vendor.acme", 1, traceable=True), silu("default.flagos", 3, traceable=True))
    plan = take_place(planning(managing(*impls, per_op_order={OP: order}), "compiled"))
    apply(plan, config)
    seal(config, digest({**fingerprint(plan, {}), "run": RUN}))
    bound = plan.bind(OP, object(), frozenset())

    @support_torch_compile(dynamic_arg_dims={"x": 0})  # type: ignore[untyped-decorator]
    class Layer(torch.nn.Module):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return bound(x * 2) + 1

    before = compilation_counter.num_backend_compilations
    try:
        with set_current_vllm_config(config), calling(engine_of(plan)), torch.inference_mode():
            layer = Layer(vllm_config=config)
            marks = {}
            for tokens in (64, 1, 4, 5):
                x = torch.randn(tokens, 8)
                with set_forward_context({}, config, num_tokens=tokens):
                    added = layer(x) - half(x * 2) - 1
                marks[tokens] = round(float(added.mean()))
    finally:
        leave_place(plan)
        torch._dynamo.reset()
    count = compilation_counter.num_backend_compilations - before
    return Served(marks, engine_of(plan).inlined, count)


def test_the_same_rows_are_found_in_the_cache() -> None:
    order = {"<=1": "flagos", "<=4": "vendor", "rest": "flagos"}
    first, again = served(order), served(order)
    assert first.marks == again.marks == {64: 3, 1: 3, 4: 1, 5: 3}
    assert first.compilations == 2
    assert [(str(sizes), impl) for _, sizes, impl in first.inlined] == [
        (f"5-{LARGEST}", "default.flagos"),
    ]
    assert not again.inlined, "the pass has nothing to do where compiled code is found"


@pytest.mark.slow
def test_a_range_of_a_single_size_runs_its_own_code() -> None:
    other = served({"<=1": "flagos", "<=4": "vendor", "rest": "vendor"})
    assert other.marks == {64: 1, 1: 3, 4: 1, 5: 1}
    assert [(str(sizes), impl) for _, sizes, impl in other.inlined] == [
        ("1", "default.flagos"),
        (f"2-{LARGEST}", "vendor.acme"),
    ]
