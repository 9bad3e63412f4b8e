"""The shared compiled engine, on a plugin's device: passes of ours put ops into vLLM's graphs."""

from __future__ import annotations

from engine_run import largest_difference
from startups import FUSED, Startup

VENDOR_SHARE = 0.1
"""As in test_startup_eager."""


def test_compiled_code_is_near_stock(startup: Startup) -> None:
    stock, ours = startup("stock"), startup("compiled")
    worst, magnitude = largest_difference(stock, ours)
    assert 0.0 < worst <= VENDOR_SHARE * magnitude
    assert ours["steps"] == stock["steps"]
    (report,) = ours["report"]
    assert report["mode"] == "compiled"
    assert report["fallbacks"] == report["demotions"] == {}


def test_fusions_and_torch_operators_are_found_and_called(startup: Startup) -> None:
    ours = startup("compiled")
    (report,) = ours["report"]
    for op, found in FUSED.items():
        assert report["ops"][op]["impl"] == "vendor.one"
        assert report["fusions"][op]["found"] == found, op
        assert f"Op '{op}': {found} places, by 'vendor.one'" in ours["log"]
        assert report["calls"][op]["vendor.one"] >= found * ours["steps"]


def test_a_plugins_device_serves_with_its_attention(startup: Startup) -> None:
    ours = startup("compiled")
    assert "attention_backend=vendor.bare_cpu" in ours["log"]
    assert "Cannot access accelerator" not in ours["log"]  # at shutdown
