"""Orders by batch size in an engine: one implementation decodes, another prefills."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_run import STOCK, Job
from engines import IN_ONE_PROCESS, Model, batches, difference, run

pytestmark = pytest.mark.slow

ORDERS = """\
op_backends:
  silu_and_mul:
    <=8: vendor:cpu          # a decoding step has one token for each request
    rest: reference
  rms_norm:
    <=8: stock
    rest: [reference]
"""

LAYERS = 2


@pytest.mark.parametrize("eager", [True, False])
def test_decoding_and_prompts_run_different_implementations(
    model: Model, tmp_path: Path, eager: bool
) -> None:
    config = tmp_path / "fl.yaml"
    config.write_text(ORDERS)
    job = Job(str(model("qwen3")), batches(), eager=eager)
    ours = run(job, VLLM_FL_CONFIG=str(config), VLLM_FL_DISPATCH_DEBUG="1", **IN_ONE_PROCESS)
    (report,) = ours["report"]
    assert report["ops"]["silu_and_mul"]["rows"] == [
        {"up_to": 8, "impl": "vendor.cpu", "reason": "your order lists vendor:cpu"}
    ]
    assert report["ops"]["silu_and_mul"]["impl"] == "reference.torch"
    assert "silu_and_mul=vendor.cpu(<=8)|reference.torch" in ours["log"]
    assert "rms_norm=stock(<=8)|reference.torch" in ours["log"]
    calls = report["calls"]
    # Most steps decode, at most eight requests at a time; prompts and the warm-up are larger.
    assert calls["silu_and_mul"]["vendor.cpu"] >= LAYERS
    assert calls["silu_and_mul"]["reference.torch"] >= LAYERS
    assert [*calls["rms_norm"]] == ["reference.torch"]  # vLLM's implementation is not counted
    assert report["fallbacks"] == report["demotions"] == {}
    stock = run(job, **STOCK, **IN_ONE_PROCESS)
    assert difference(stock, ours) < 0.05
