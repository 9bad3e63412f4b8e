"""vLLM operators that a model calls by name, without a CustomOp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_model
from engine_run import STOCK, Job
from engines import IN_ONE_PROCESS, PLUGINS, batches, difference, direct_model, run

pytestmark = pytest.mark.slow

LAYERS = 2

DIRECT = {
    **IN_ONE_PROCESS,
    "PYTHONPATH": str(PLUGINS / "direct"),
    "VLLM_FL_PLUGIN_MODULES": "direct_operators",
    "VLLM_FL_DISPATCH_DEBUG": "1",
}

ORDER = {"VLLM_FL_PER_OP": "silu_and_mul=vendor:direct"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return direct_model(tiny_model.make(tmp_path_factory.mktemp("direct")))


def served(model: Path, *, eager: bool = True, **variables: str) -> dict[str, Any]:
    return run(Job(str(model), batches(), eager=eager), **{**DIRECT, **variables})


def test_a_call_by_name_runs_the_planned_implementation(model: Path) -> None:
    stock = served(model, **STOCK)
    ours = served(model, **ORDER)
    (report,) = ours["report"]
    ((name, target),) = report["operators"]["silu_and_mul"].items()
    assert name == "_C::silu_and_mul" and "torch_bindings.cpp" in target.pop("replaced")
    assert target == {"overridden_by": None, "without_engine": 0, "other_arguments": 0}
    # The calls of all steps and of the warm-up.
    assert report["calls"]["silu_and_mul"]["vendor.direct"] >= LAYERS * ours["steps"]
    assert not report["fallbacks"]
    assert 0 < difference(stock, ours) < 0.05, "another order of roundings, in bfloat16"


def test_compiled_code_and_what_is_loaded_from_the_cache_call_the_override(
    model: Path, tmp_path: Path
) -> None:
    cache = {**ORDER, "VLLM_CACHE_ROOT": str(tmp_path)}
    made, loaded = (served(model, eager=False, **cache) for _ in range(2))
    assert "Directly load AOT compilation" not in made["log"]
    assert "saved AOT compiled function" in made["log"]
    assert "Directly load AOT compilation" in loaded["log"]
    for ours in (made, loaded):
        (report,) = ours["report"]
        assert report["mode"] == "compiled"
        assert report["calls"]["silu_and_mul"]["vendor.direct"] >= LAYERS * ours["steps"]
    assert made["tokens"] == loaded["tokens"]
    assert difference(made, loaded) == 0.0
