"""A worker's startup with a kernel that is incorrect only on the loaded model."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from small_workers import answers

pytest.importorskip("vllm", reason="vLLM is not installed")

COUNTS = [256, 17, 16, 1]
"""Tokens of the loaded model's forward passes."""

ENABLED = ["+gelu_and_mul", "+silu_and_mul"]

START = """
def wrong(x):
    # Its own check at start never sees a row beyond the 200th of rows this wide.
    found = right(x)
    if x.shape[-1] == 1280 and len(x) > 200:
        found[-1] += 1
    return found


# In some engines it is right, and takes no layer's call of so many tokens.
refused = range(*json.loads(os.environ.get("REFUSED", "[0]")))


def takes(x):
    return x.shape[-1] != 1280 or len(x) not in refused or "rows of 1280"


get_default_manager().ensure_initialized("cpu", defer_errors=True)
get_default_manager().registry.register_many(
    [silu("vendor.wrong", fn=lambda x: (right if len(refused) else wrong)(x),
          supports=takes if len(refused) else None, priority=999),
     # An op of which the model has no layer.
     OpImpl("gelu_and_mul", "vendor.idle", BackendImplKind.VENDOR,
            lambda x, approximate="none": gelu.oracle(x, approximate).to(x.dtype), "idle"),
     silu("vendor.acme", fn=lambda x: right(x), priority=998)]
)


engines.exchange = lambda what, mine, failure="": [mine, mine]
worker = planned_worker(
    {"VLLM_FL_PREFLIGHT": "verify",
     "VLLM_FL_PER_OP": "silu_and_mul=vendor:wrong|vendor:acme;gelu_and_mul=vendor:idle"})
worker.init_device()
worker.load_model()
result = {"report": worker.vllm_fl_report()}
result["bound"] = [act._vllm_fl_plan is worker.vllm_fl_engine.plan for act in worker.model.blocks]
x = torch.randn(300, 1280).bfloat16()
result["right"] = all(torch.equal(act(x), right(x)) for act in worker.model.blocks)
result["entry"] = worker.vllm_config.additional_config["vllm_fl"]
result["entry"].get("enabled", []).sort()
result["calls"] = calls
worker.shutdown()
print(json.dumps(result))
"""


CASES = {
    "wrong": {},
    "refuses all": {"REFUSED": "[0, 1000]"},
    "takes the largest batch": {"REFUSED": "[0, 400]"},
}
"""Case -> the variables that its kernels read. Other ranks and strict mode: test_veto.py."""


@cache
def starts() -> dict[str, tuple[Any, str]]:
    """Case -> (results of a worker's startup in its own process, its log)."""
    return answers(START, CASES)


def test_a_fault_of_the_loaded_model_disables_and_binds_the_layers_again() -> None:
    result, log = starts()["wrong"]
    report = result["report"]
    assert "blocks.0, x (256, 1280) bfloat16" in report["demotions"]["silu_and_mul"]["vendor.wrong"]
    assert report["ops"]["silu_and_mul"]["impl"] == "vendor.acme"
    assert result["bound"] == [True, True] and result["right"]
    assert result["calls"] == COUNTS * 2, "once more for the plan without it"
    assert result["entry"] == {"plan": report["digest"], "enabled": ENABLED}
    (line,) = [line for line in log.splitlines() if " planned: " in line]
    assert "silu_and_mul=vendor.acme" in line and f"digest {report['digest']}" in line
    assert len(line[line.index("vllm-fl: ") :]) <= 200
    assert "silu_and_mul: vendor.wrong is disabled [FL410]" in report["remarks"]
    assert any(remark.startswith("4 calls on live tensors in") for remark in report["remarks"])
    assert not report["calls"] and not report["fallbacks"]


def test_what_refuses_every_call_of_the_loaded_model_is_rejected_without_its_name() -> None:
    result, log = starts()["refuses all"]
    report = result["report"]
    assert report["ops"]["silu_and_mul"]["impl"] == "vendor.acme"
    (why,) = report["rejections"]["silu_and_mul"].values()
    assert why == "it supports no call of this model (rows of 1280)"
    assert report["demotions"] == {} and report["refusals"] == {} == report["fallbacks"]
    assert result["bound"] == [True, True] and result["right"]
    # Also tried at the largest batch before it is disabled; then the model without it.
    assert result["calls"] == [*COUNTS, 512, *COUNTS, *COUNTS]
    assert result["entry"] == {"plan": report["digest"], "enabled": ENABLED}
    (line,) = [line for line in log.splitlines() if " planned: " in line]
    assert "silu_and_mul=vendor.acme" in line
    assert "silu_and_mul: vendor.wrong supports no call [FL412]" in report["remarks"]
    assert "is rejected for op 'silu_and_mul': it supports no call of this model" in log


def test_an_implementation_that_takes_some_calls_stays_and_uncalled_ops_are_not_counted() -> None:
    result, log = starts()["takes the largest batch"]
    report = result["report"]
    assert report["rejections"] == {} == report["refusals"] and "FL412" not in log
    assert set(report["not_reached"]) == {"gelu_and_mul"}
    assert report["ops"]["gelu_and_mul"]["impl"] == "vendor.idle", "and stays planned"
    (line,) = [line for line in log.splitlines() if " planned: " in line]
    assert "vllm-fl: 1 op planned: silu_and_mul=vendor.wrong (" in line
    assert "unused by this model: gelu_and_mul" in report["remarks"]
