"""Plugins in exactly the form of vllm-plugin-FL's vendor folders serve an eager engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from engine_run import Job, largest_difference
from engines import IN_ONE_PROCESS, Runner, batches, run

import envs

PLUGINS = Path(__file__).parents[1] / "plugins"

ORDER = {
    "rms_norm": "musa",  # a method of a backend, which takes the layer and writes in place
    "rotary_embedding": "iluvatar",  # a function of the layer without `rotary_interleaved`
    "silu_and_mul": "musa",
}


def test_two_of_them_serve_side_by_side_from_their_entry_points(
    engine: Runner, model: Callable[[str], Path], tmp_path: Path
) -> None:
    wheels = [str(envs.wheel(PLUGINS / f"fl-form-{name}")) for name in ("iluvatar", "musa")]
    options = ("-q", "--no-deps", "--no-index", "--target", str(tmp_path))
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *wheels], check=True)
    # In float32, where another order of operations leaves every token what it is.
    job = Job(str(model("qwen3")), batches(), options={"dtype": "float32"})
    result = run(
        job,
        **IN_ONE_PROCESS,
        PYTHONPATH=str(tmp_path),
        VLLM_FL_DISPATCH_DEBUG="1",
        VLLM_FL_PER_OP=";".join(f"{op}=vendor:{vendor}" for op, vendor in ORDER.items()),
    )
    (report,) = result["report"]
    for op, vendor in ORDER.items():
        assert report["ops"][op]["impl"] == f"vendor.{vendor}", result["log"][-6000:]
        assert report["calls"][op][f"vendor.{vendor}"] > 0
    assert report["fallbacks"] == {} and report["demotions"] == {}
    stock = engine("qwen3", "stock-float32")
    assert result["tokens"] == stock["tokens"]
    off, magnitude = largest_difference(stock, result)
    assert off <= 1e-4 * magnitude
