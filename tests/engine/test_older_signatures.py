"""A plugin with the first documentation's signatures serves an engine as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_run import Job, largest_difference
from engines import IN_ONE_PROCESS, Runner, batches, run

OPS = ("rms_norm", "rotary_embedding", "silu_and_mul")


@pytest.mark.slow
@pytest.mark.parametrize("eager", [True, False])
def test_it_is_verified_planned_and_called(
    eager: bool,
    engine: Runner,
    model: Callable[[str], Path],
    plugin: Callable[..., dict[str, str]],
) -> None:
    # In float32, where another order of operations leaves every token what it is.
    job = Job(str(model("qwen3")), batches(), eager=eager, options={"dtype": "float32"})
    order = ";".join(f"{op}=vendor:seeds" for op in OPS)
    variables = {"VLLM_FL_DISPATCH_DEBUG": "1", "VLLM_FL_PER_OP": order}
    result = run(job, **variables, **IN_ONE_PROCESS, **plugin("seeds_signatures"))
    (report,) = result["report"]
    assert {op: report["ops"][op]["impl"] for op in OPS} == dict.fromkeys(OPS, "vendor.seeds")
    assert "takes no " not in result["log"]  # the model gives none of what it lacks
    assert all(report["calls"][op]["vendor.seeds"] > 0 for op in OPS)
    stock = engine("qwen3", "stock-float32", eager)
    assert result["tokens"] == stock["tokens"]
    off, magnitude = largest_difference(stock, result)
    assert off <= 1e-4 * magnitude
