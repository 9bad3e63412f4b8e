"""The shared engine with wrong kernels, detected at different moments: disabled, then stock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engines import assert_same_bits, command, path_of
from startups import CAUSES, Startup, modules


@pytest.mark.parametrize("op", CAUSES)
def test_a_kernel_that_is_wrong_on_made_inputs_is_off_by_name(startup: Startup, op: str) -> None:
    result = startup("faulty")
    (report,) = result["report"]
    assert CAUSES[op] in report["demotions"][op]["vendor.faulty"]
    named = f"Implementation 'vendor.faulty' failed for op '{op}'"
    lines = [line for line in result["log"].splitlines() if named in line]
    assert len(lines) == 1 and CAUSES[op] in lines[0]


def test_one_that_is_wrong_on_the_loaded_model_is_off_by_its_layer(startup: Startup) -> None:
    (report,) = startup("faulty")["report"]
    why = report["demotions"]["silu_and_mul"]["vendor.liveonly"]
    assert "in layer model.layers.0.mlp.act_fn, x (256, " in why


def test_one_that_is_wrong_once_the_cache_is_there_is_off(startup: Startup) -> None:
    result = startup("faulty")
    (report,) = result["report"]
    why = report["demotions"]["silu_and_mul"]["vendor.afterstart"]
    assert "(with the KV cache in memory)" in why and "silu_and_mul" not in report["wrong"]
    assert report["ops"]["silu_and_mul"]["impl"] == "reference.torch"
    assert report["calls"]["silu_and_mul"].keys() == {"reference.torch"}
    assert report["fallbacks"] == {}, "the layers are bound to the final plan"
    assert f"digest {report['digest']}" in result["log"]


def test_the_plan_that_is_left_is_stock_bit_for_bit(startup: Startup) -> None:
    stock, ours = startup("stock"), startup("faulty")
    assert_same_bits(stock, ours)
    assert ours["kv_blocks"] == stock["kv_blocks"]
    (report,) = ours["report"]
    for op in ("rotary_embedding", "gelu_and_mul"):
        assert report["ops"][op]["impl"] == "reference.torch"


def test_one_that_keeps_old_weights_is_named_when_they_are_updated(startup: Startup) -> None:
    result = startup("faulty")
    equal, changed = result["updates"]
    assert equal["answers"] == [None]
    named = "After the weights were updated, verification failed for implementation 'vendor.after"
    assert named in changed["error"]
    assert result["report"][0]["wrong"].keys() == {"rms_norm"}


def test_report_and_counters_are_left_after_shutdown(startup: Startup, shared: Path) -> None:
    log = startup("faulty")["log"]
    assert "fallbacks none, calls {" in log and "'reference.torch':" in log
    left = json.loads((shared / "chat.report.json").read_text())
    assert (left["state"], left["error"]["method"]) == ("ended", "reload_weights")
    assert left["report"]["ops"]["silu_and_mul"]["impl"] == "reference.torch"
    assert left["report"]["calls"]["rotary_embedding"]["reference.torch"] > 0
    assert not (shared / "chat.rank0.prom").exists(), "an engine that ended is not shown"


def replayed(file: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """(exit status, impl id -> findings) of the command."""
    loaded = modules("faulty", "live_only")
    loaded |= path_of(loaded["PYTHONPATH"])
    done = command("verify", "--json", "--replay", file, *options, **loaded)
    assert done.stdout, done.stderr
    results = json.loads(done.stdout)["results"]
    return done.returncode, {each["impl_id"]: each["findings"] for each in results}


def test_the_first_fault_of_each_is_kept_and_its_message_has_the_file(
    startup: Startup, shared: Path
) -> None:
    result = startup("faulty")
    kept = {f"{op}.vendor.faulty" for op in CAUSES}
    kept |= {f"{op}.vendor.afterstart" for op in ("silu_and_mul", "rms_norm")}
    kept |= {"silu_and_mul.vendor.liveonly"}
    folder = shared / "faults"
    files = {name: folder / f"{name}.rank0.safetensors" for name in kept}
    assert {*folder.iterdir()} == {*files.values()}
    for file in files.values():
        assert f"; its arguments are in {file}" in result["log"], file
    live = files["silu_and_mul.vendor.liveonly"]
    status, found = replayed(live, "--impl", "vendor.liveonly", "--impl", "reference.torch")
    assert (status, [each["status"] for each in found["vendor.liveonly"]]) == (1, ["wrong"])
    assert [each["status"] for each in found["reference.torch"]] == ["ok"]
