"""`vllm-fl plan`, without vLLM: tests/engine compares it with an engine's worker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import THREE, Command, Plugin

OP = "silu_and_mul"
ANY = {"layers": {}, "in_model": True}
"""Plan fields of an engine with any model."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_each_op_with_its_implementation_and_reason(fl: Command, plugin: Plugin) -> None:
    plugin(THREE)
    done = fl("plan", "--json", VLLM_FL_PLATFORM="none")
    plan = done.json()["plan"]
    assert (done.status, plan["mode"], plan["verified"]) == (0, "compiled", False)
    assert plan["ops"][OP] == {"impl": "vendor.acme", "reason": "the order lists vendor", **ANY}
    assert plan["unasked"] == "vLLM is not installed" and plan["aside"] == ""
    shown = fl("plan", VLLM_FL_PLATFORM="none").out
    assert plan["unasked"] in shown and "may still disable an implementation" in shown


def test_orders_by_size(fl: Command, plugin: Plugin) -> None:
    plugin(THREE)
    orders = {"VLLM_FL_CONFIG": "sizes.yaml"}
    Path("sizes.yaml").write_text(f"op_backends: {{{OP}: {{<=16: vendor, rest: [stock]}}}}\n")
    entry = fl("plan", "--mode", "eager", "--json", **orders).json()["plan"]["ops"][OP]
    assert entry["impl"] == "stock"
    assert [(row["up_to"], row["impl"]) for row in entry["rows"]] == [(16, "vendor.acme")]
    assert "vendor.acme(<=16)|stock" in fl("plan", **orders).out


def test_what_would_change(fl: Command, plugin: Plugin) -> None:
    plugin(THREE)
    Path("fl.yaml").write_text(f"op_backends: {{{OP}: [reference]}}\n")
    diff = fl("plan", "--diff", "fl.yaml", "--json", VLLM_FL_PREFER="vendor").json()["diff"]
    assert [(op, d["now"]["impl"], d["then"]["impl"]) for op, d in diff["ops"].items()] == [
        (OP, "vendor.acme", "reference.torch")
    ]
    assert any("fl.yaml" in warning for warning in diff["warnings"])  # lists what it overrides
    diff = fl("plan", "--diff", "stock", "--json").json()["diff"]
    assert [*diff["ops"]] == [OP] and diff["ops"][OP]["then"] == {"impl": "stock", "reason": ""}
    Path("then.json").write_text(fl("plan", "--json").out)
    assert fl("plan", "--diff", "then.json", "--json").json()["diff"]["ops"] == {}
    moved = fl("plan", "--diff", "then.json", "--json", VLLM_FL_DENY_VENDORS="acme").json()["diff"]
    assert moved["ops"][OP]["then"]["impl"] == "vendor.acme"
    shown = fl("plan", "--diff", "stock").out
    assert "1 op differs" in shown and "with stock" in shown and "the order lists vendor" in shown


def test_strict_mode_that_would_end_the_start(fl: Command, plugin: Plugin) -> None:
    plugin(THREE)
    strict = {"VLLM_FL_STRICT": "1", "VLLM_FL_PER_OP": f"{OP}=vendor:cuda"}
    done = fl("plan", "--json", **strict)
    assert done.status == 1 and "vendor:cuda" in done.json()["plan"]["ends"][0]
    assert "Startup would fail: strict mode" in fl("plan", **strict).out


@pytest.mark.parametrize(
    "arguments",
    [
        ("--model", "m"),  # vLLM is missing
        ("--dtype", "half"),  # vLLM's argument, without a model
        ("--mode", "script"),
        ("--diff", "absent.yaml"),
        ("--diff", "other.json"),
        ("--diff", "settings.json"),  # a plan by its name
        ("--diff", "wrong.yaml"),
        ("--diff", "label.lock"),
        ("--diff", "deep.json"),
    ],
)
def test_wrong_arguments(fl: Command, plugin: Plugin, arguments: tuple[str, ...]) -> None:
    plugin(THREE)
    Path("other.json").write_text('{"plan": {"ops": {"rms_norm": 3}}}')
    Path("settings.json").write_text('{"prefer": "vendor"}')
    Path("wrong.yaml").write_text("op_backends: {silu_and_mul: [vendr]}\n")
    lock = {"vllm_fl_lock": 3, "facts": {"plan": {"rms_norm": "a(<=x)|b"}}, "result": {}, "seed": 1}
    Path("label.lock").write_text(json.dumps(lock))
    Path("deep.json").write_text("[" * 5000)
    Path("old.lock").write_text('{"vllm_fl_lock": 1}')
    assert "not a complete version" in str(fl("plan", "--diff", "old.lock"))
    done = fl("plan", *arguments, "--json")
    assert (done.status, done.out) == (2, "") and done.err


def test_where_no_plugin_is_loaded_no_op_is_known_and_it_is_said_why(fl: Command) -> None:
    done = fl("plan", VLLM_FL_PLATFORM="none", VLLM_FL_PLUGINS="")
    assert "VLLM_FL_PLUGINS does not contain" in done.out and "vllm-fl-ops" in done.out
    done = fl("explain", "rms_norm", VLLM_FL_PLUGINS="")
    assert done.status == 2
    assert "Known: none." in done.err and "does not contain vllm-fl-ops." in done.err
