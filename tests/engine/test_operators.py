"""vLLM operators that a model calls by name, without a CustomOp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from engine_run import STOCK, Job, largest_difference
from engines import IN_ONE_PROCESS, PLUGINS, batches, run

pytestmark = pytest.mark.slow

LAYERS = 2

DIRECT = {
    **IN_ONE_PROCESS,
    "PYTHONPATH": str(PLUGINS / "direct"),
    "VLLM_FL_PLUGIN_MODULES": "direct_operators",
    "VLLM_FL_DISPATCH_DEBUG": "1",
}

OPERATOR = "_C::silu_and_mul"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model with the activation `torch.ops._C.silu_and_mul`."""
    folder = tiny_model.make(tmp_path_factory.mktemp("direct"))
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "architectures": ["DirectQwen3ForCausalLM"]}))
    return folder


def served(model: Path, *, eager: bool = True, **variables: str) -> dict[str, Any]:
    return run(Job(str(model), batches(), eager=eager), **{**DIRECT, **variables})


def test_a_call_by_name_runs_the_planned_implementation(model: Path) -> None:
    stock = served(model, **STOCK)
    ours = served(model, VLLM_FL_PER_OP="silu_and_mul=vendor:direct")
    (report,) = ours["report"]
    (target,) = report["operators"]["silu_and_mul"].items()
    assert target[0] == OPERATOR and "torch_bindings.cpp" in target[1].pop("replaced")
    counted = {"without_engine": 0, "other_arguments": 0}
    assert target[1] == {"overridden_by": None, **counted}
    # The calls of all steps and of the warm-up.
    assert report["calls"]["silu_and_mul"]["vendor.direct"] >= LAYERS * ours["steps"]
    assert not report["fallbacks"]
    worst, magnitude = largest_difference(stock, ours)
    assert 0 < worst < 0.05 * magnitude, "another order of roundings, in bfloat16"


def test_compiled_code_and_what_is_loaded_from_the_cache_call_the_override(
    model: Path, tmp_path: Path
) -> None:
    cache = {
        "VLLM_FL_PER_OP": "silu_and_mul=vendor:direct",
        "VLLM_CACHE_ROOT": str(tmp_path),
    }
    made, loaded = (served(model, eager=False, **cache) for _ in range(2))
    assert "Directly load AOT compilation" not in made["log"]
    assert "saved AOT compiled function" in made["log"]
    assert "Directly load AOT compilation" in loaded["log"]
    for ours in (made, loaded):
        (report,) = ours["report"]
        assert report["mode"] == "compiled"
        assert report["calls"]["silu_and_mul"]["vendor.direct"] >= LAYERS * ours["steps"]
    assert made["tokens"] == loaded["tokens"]
    assert largest_difference(made, loaded)[0] == 0.0
