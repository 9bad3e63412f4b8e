"""`vllm-fl ops`."""

from __future__ import annotations

from commands import Command, Plugin

from vllm_fl.contracts import contracts


def test_every_op_with_its_candidates(fl: Command, plugin: Plugin) -> None:
    plugin()
    done = fl("ops", "--script", "--json", VLLM_FL_PLATFORM="none")
    assert done.status == 0  # nobody brings the others, which nothing is wrong with
    ops = {op["op"]: op for op in done.json()["ops"]}
    assert set(ops) == set(contracts())
    assert ops["rms_norm"] == {
        "op": "rms_norm",
        "selected": None,
        "by_size": False,
        "note": "",
        "candidates": [],
    }
    (candidate,) = ops["silu_and_mul"]["candidates"]
    assert candidate == {
        "impl_id": "vendor.acme",
        "kind": "vendor",
        "vendor": "acme",
        "priority": 100,
        "distribution": None,
        "version": None,
        "status": "selected",
        "reason": "the order says vendor",
    }


def test_where_no_plugin_is_loaded_no_op_is_known_and_it_is_said_why(fl: Command) -> None:
    done = fl("ops", VLLM_FL_PLATFORM="none", VLLM_FL_PLUGINS="")
    assert "VLLM_FL_PLUGINS leaves out" in done.out and "vllm-fl-ops" in done.out
    done = fl("explain", "rms_norm", VLLM_FL_PLUGINS="")
    assert done.status == 2
    assert "Known: none." in done.err and "VLLM_FL_PLUGINS leaves out vllm-fl-ops." in done.err
