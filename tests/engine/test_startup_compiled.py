"""The shared compiled engine, on a plugin's device: our passes insert ops into vLLM's graphs."""

from __future__ import annotations

from engines import Model, assert_near_transformers
from startups import FUSED, Startup


def test_compiled_code_is_near_transformers(startup: Startup, model: Model) -> None:
    ours = startup("compiled")
    assert_near_transformers(model("qwen3"), ours)
    (report,) = ours["report"]
    assert report["mode"] == "compiled"
    assert report["fallbacks"] == report["demotions"] == {}
    assert report["ops"]["attention_backend"]["impl"] == "vendor.bare_cpu"
    assert "Cannot access accelerator" not in ours["log"]  # at shutdown


def test_fusions_and_torch_operators_are_found_and_called(startup: Startup) -> None:
    ours = startup("compiled")
    (report,) = ours["report"]
    for op, found in FUSED.items():
        assert report["ops"][op]["impl"] == "vendor.one"
        assert report["fusions"][op]["found"] == found, op
        assert f"Op '{op}': {found} matches, by 'vendor.one'" in ours["log"]
        assert report["calls"][op]["vendor.one"] >= found * ours["steps"]
