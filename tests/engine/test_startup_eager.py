"""The shared eager engine: plugins' code runs in every kind of target that eager mode has."""

from __future__ import annotations

from pathlib import Path

from engines import difference
from startups import OWN, VENDOR_SHARE, Startup


def test_the_plan_is_near_stock(startup: Startup) -> None:
    stock, ours = startup("stock"), startup("eager")
    assert 0.0 < difference(stock, ours) <= VENDOR_SHARE
    assert stock["steps"] == ours["steps"] == 2 * 8  # no prompt of a batch came late
    assert ours["kv_blocks"] == stock["kv_blocks"] and stock["report"] is None
    (report,) = ours["report"]
    assert report["mode"] == "eager"
    assert report["fallbacks"] == report["demotions"] == {}


def test_layers_and_ops_of_the_ir_run_the_vendors_kernels(startup: Startup) -> None:
    ours = startup("eager")
    (report,) = ours["report"]
    for op in ("rms_norm", "rotary_embedding", "silu_and_mul"):
        assert report["ops"][op]["impl"] == "vendor.cpu"
        assert report["calls"][op]["vendor.cpu"] >= ours["steps"], op


def test_an_operator_and_a_function_run_the_planned_implementation(startup: Startup) -> None:
    ours = startup("eager")
    (report,) = ours["report"]
    for op in ("fused_experts", "moe_topk"):
        assert report["ops"][op]["impl"] == "reference.torch"
        assert report["calls"][op]["reference.torch"] >= ours["steps"], op
    experts = report["operators"]["fused_experts"]
    assert {"_C::cpu_fused_moe", "_C::prepack_moe_weight"} <= experts.keys()
    assert not any("left" in target for target in experts.values())
    assert any("_softmax_topk" in name for name in report["functions"]["moe_topk"])


def test_attention_is_the_plugins_class(startup: Startup, shared: Path) -> None:
    ours = startup("eager")
    (report,) = ours["report"]
    planned = {"impl": "vendor.counting", "reason": "the order lists vendor"}
    assert report["ops"]["attention_backend"] == planned
    assert (shared / "uses").stat().st_size >= 2 * ours["steps"]  # layers


def test_whole_layers_are_the_plugins_classes_asked_of_one_request(startup: Startup) -> None:
    ours = startup("eager")
    report, log = ours["report"][0], ours["log"]
    assert report["layers"] == OWN
    for layer, number in OWN.items():
        assert report["ops"][layer]["impl"] == "vendor.own"
        assert report["calls"][layer]["vendor.own"] > 0
        assert f"Layer {layer}: {number} in this model, by 'vendor.own'" in log
    assert "whole layers, not verified: QKVParallelLinear RowParallelLinear" in log
    asked = {line.partition("own layers: ")[2] for line in log.splitlines()} - {""}
    assert len(asked) == len(OWN)
    assert all("dtype=torch.bfloat16, quantization=None" in line for line in asked)
    assert all("tensor_parallel_size=1" in line and "compiled=False" in line for line in asked)


def test_a_broken_plugin_is_named_and_stops_nothing(startup: Startup) -> None:
    log = startup("eager")["log"]
    (line,) = {
        line.partition("[vllm_fl.plugins] ")[2]
        for line in log.splitlines()
        if "Plugin 'broken_import' of broken_import failed: ImportError" in line
    }
    assert "libacme.so.3: cannot open shared object file" in line and line.endswith("[FL201]")


def test_the_attention_of_a_plugin_is_compared(startup: Startup) -> None:
    (remark,) = [
        each for each in startup("eager")["report"][0]["remarks"] if "attention on" in each
    ]
    assert int(remark.split()[0]) >= 20 and "not compared" not in remark


def test_the_start_line_names_the_plan_in_two_hundred_characters(startup: Startup) -> None:
    log = startup("eager")["log"]
    lines = [line for line in log.splitlines() if "vllm-fl: " in line and " planned: " in line]
    assert len(lines) == 1 and len(lines[0][lines[0].index("vllm-fl: ") :]) <= 200
    assert "attention_backend=vendor.counting" in lines[0] and "verified in" in lines[0]
    for name in ("stock", "eager"):
        assert "Unknown vLLM environment variable" not in startup(name)["log"]
