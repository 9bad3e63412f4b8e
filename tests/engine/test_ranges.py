"""Orders by size where vLLM compiles by range: each range has the code of its row in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_run import Job, largest_difference, run
from engines import IN_ONE_PROCESS, PLUGINS, Runner, batches

ROWS = """\
op_backends:
  silu_and_mul:
    <=8: stock
    rest: reference
  rms_norm:
    <=8: reference
    rest: [stock]
"""
OTHER_ROWS = ROWS.replace("<=8: reference", "<=1: reference")

DEVICE = {
    **IN_ONE_PROCESS,
    "PYTHONPATH": str(PLUGINS),
    "VLLM_FL_PLUGIN_MODULES": "oot_cpu",
    "VLLM_FL_PLATFORM": "oot_cpu",
    "OOT_CPU_COMPILES": "1",
}


def inlined(report: Any, op: str) -> list[tuple[int, str | None]]:
    """(the last token count, whose code) of each range."""
    return [(told["last"], told["impl"]) for told in report["ranges"][op]]


@pytest.mark.slow
def test_ranges_run_their_rows_and_a_restart_finds_them_in_the_cache(
    model: Callable[[str], Path], engine: Runner, tmp_path: Path
) -> None:
    job = Job(str(model("qwen3")), batches(), eager=False, options={"dtype": "float32"})

    def served(rows: str) -> dict[str, Any]:
        config = tmp_path / "fl.yaml"
        config.write_text(rows)
        places = {"VLLM_FL_CONFIG": str(config), "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
        return run(job, **DEVICE, **places)

    def found(result: dict[str, Any]) -> int:
        """In how many places of graphs that were compiled code was inlined."""
        (report,) = result["report"]
        return sum(told["places"] for op in report["ranges"].values() for told in op)

    first = served(ROWS)
    (report,) = first["report"]
    (_, largest) = (last for last, _ in inlined(report, "silu_and_mul"))
    assert inlined(report, "silu_and_mul") == [(8, "stock.vllm"), (largest, "reference.torch")]
    assert inlined(report, "rms_norm") == [(8, "reference.torch"), (largest, "stock.vllm")]
    assert all(told["places"] for op in report["ranges"].values() for told in op)
    told = f"silu_and_mul inlined in 2 of 2 ranges (1-8, 9-{largest} tokens)"
    assert told in first["log"]
    assert "one operator each that the compiler takes whole" not in first["log"]
    assert "cannot be traced" not in first["log"]

    again = served(ROWS)
    assert found(again) == 0 and again["tokens"] == first["tokens"]
    other = served(OTHER_ROWS)
    assert found(other) > 0
    assert [last for last, _ in inlined(other["report"][0], "silu_and_mul")] == [1, 8, largest]

    stock = engine("qwen3", "stock-float32")
    for ours in (first, other):
        assert ours["tokens"] == stock["tokens"]
        worst, magnitude = largest_difference(stock, ours)
        assert worst <= 1e-4 * magnitude  # two orders above float32's rounding after two layers
