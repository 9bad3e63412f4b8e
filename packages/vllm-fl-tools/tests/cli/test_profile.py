"""`vllm-fl tune --profile`: the requests to its engine, its answer, and its page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from profiles import LINEAR, NORM, NORM_OP, on_device, on_host, places, report

from vllm_fl_tools.cli import _engines

ENGINE = """
import json, os, sys

request = json.loads(sys.argv[-1])
profiled = json.load(open("profiled.json"))
assert request["options"]["worker_extension_cls"].startswith("vllm_fl_tools.integration.profiling")
assert not os.path.exists(os.environ["VLLM_CACHE_ROOT"])
if "--bad" in request.get("arguments", []):
    print(json.dumps({"usage": "unrecognized arguments: --bad"}), flush=True)
    sys.exit()
ready = {"report": profiled["report"], "vocabulary": 50, "length": 400, "graph_tokens": 0}
print(json.dumps(ready), flush=True)
asked = open("asked", "w")
for line in sys.stdin:
    ((kind, what),) = json.loads(line).items()
    print(json.dumps([kind, what, request.get("arguments", [])]), file=asked, flush=True)
    if kind == "places":
        answer = profiled["places"]
    elif kind == "profile":
        answer = profiled["seen"]
    else:
        answer = {"tokens": [], "steps": [0.0001] * (what["new_tokens"] * what["times"] - 1)}
        answer["steps"] = [9.0] * (what["new_tokens"] > 1) + answer["steps"]
    print(json.dumps(answer), flush=True)
"""
HOST = {
    "places": places(),
    "report": report(),
    "seen": on_host(
        (0.0, 2, (NORM, NORM_OP)),
        (40.0, 2, (NORM, NORM_OP, "_C::rms_norm")),
        (120.0, 2, (LINEAR, "_C::onednn_mm")),
    ),
}


@pytest.fixture
def profile(fl: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`profile(…)`: the command, with an engine that returns the given profile."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    monkeypatch.setattr(_engines, "COMMAND", (sys.executable, str(script)))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, profiled: dict[str, Any] = HOST, **variables: str) -> Any:
        (tmp_path / "profiled.json").write_text(json.dumps(profiled))
        return fl("tune", "--profile", "--model", "model", *arguments, **variables)

    return run


def asked(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "asked").read_text().splitlines()]


def test_the_table_stands_beside_the_step_s_time(profile: Any) -> None:
    done = profile()
    assert done.status == 0, done.err
    decode, prefill = done.out.split("\nprefill, 256 tokens\n")
    assert "\ndecode, batch 1\n" in decode
    for phase in (decode, prefill):
        lines = [line.split() for line in phase.splitlines()]
        assert ["rms_norm", "vendor.cpu", "25.0%", "20.0", "1.0", "yes"] in lines
        assert "_C::onednn_mm in QKVParallelLinear  stock" in phase
        said = "Implementations run 25.0% of the operators' time and could run 0.0% more; "
        assert f"\n{said}in this engine, vLLM's code always runs 75.0%.\n" in f"\n{phase}"
        assert phase.index(said) < phase.index("share  ")
        assert "No contract: 75.0%, in the rows without an op." in phase
        assert "All operators: 80.0 µs per step in 2 calls." in phase
        assert "The step without the profiler: 100.0 µs." in phase
        assert "The remainder: 20.0 µs (20.0%): Python" in phase


def test_decode_and_prefill_are_asked_for_apart(profile: Any, tmp_path: Path) -> None:
    given = ("--enforce-eager", "-tp", "1", "--dtype", "bfloat16")
    done = profile("--batch", "1,8", *given)
    assert done.status == 0, done.err
    requests = asked(tmp_path)
    assert all(arguments == list(given) for *_, arguments in requests)
    profiles = [what for kind, what, _ in requests if kind == "profile"]
    assert [(p["decode"], p["visit"]["batch"], p["steps"]) for p in profiles] == [
        (True, 1, 16),
        (True, 8, 16),
        (False, 1, 16),
    ]
    assert [p["visit"]["new_tokens"] for p in profiles] == [18, 18, 1]
    assert [p["visit"]["times"] for p in profiles] == [1, 1, 16]
    seeds = [what["seed"] for kind, what, _ in requests if kind == "visit"]
    assert len({*seeds}) == len(seeds), "a prompt would be found in the prefix cache"


def test_a_device_s_kernels(profile: Any) -> None:
    profiled = {
        "places": places(device="GPU 3000", ranks=2),
        "report": report(),
        "seen": on_device(90.0, (100.0, 2, "gemm", (LINEAR, "aten::mm")), steps=2),
    }
    done = profile(profiled=profiled)
    assert done.status == 0, done.err
    assert "model: eager, GPU 3000, rank 0 of 2, digest 0123" in done.out
    assert "All kernels: 50.0 µs per step in 1 calls, 5.0 of them in parallel." in done.out
    assert "The step without the profiler: 100.0 µs.\n" in done.out
    assert "The remainder: 55.0 µs (55.0%)" in done.out
    done = profile(profiled={**profiled, "seen": on_device(0.0)})
    assert done.status == 1
    assert "Not profiled: PyTorch's profiler recorded no kernel of the device" in done.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--batch", "0"), "--batch 0: expected numbers"),
        (("--bad",), "vLLM rejects these arguments: unrecognized arguments: --bad"),
        (("--worker_extension_cls=x.Y",), "--profile sets --worker-extension-cls"),
        (("--model", "nowhere"), "--model nowhere: it is not a folder"),
    ],
)
def test_one_clear_error(profile: Any, arguments: tuple[str, ...], said: str) -> None:
    done = profile(*arguments)
    assert done.status == 2 and said in done.err and not done.out
    assert "Traceback" not in done.err


def test_without_a_plan_there_is_nothing_to_look_at(profile: Any) -> None:
    done = profile(VLLM_FL_PREFER_ENABLED="0")
    assert done.status == 2 and "VLLM_FL_ENABLED is set to off" in done.err


def test_a_page_of_it(profile: Any, fl: Command, tmp_path: Path) -> None:
    done = profile("--json", "--dtype", "bfloat16")
    coverage = done.json()["coverage"]
    assert [phase["kind"] for phase in coverage["phases"]] == ["decode", "prefill"]
    assert coverage["phases"][0]["rows"][0]["kernels"] == {"_C::onednn_mm": 60.0}
    (tmp_path / "seen.json").write_text(done.out)
    page = fl("show", "seen.json", "--html", "page.html", "--json")
    assert page.status == 0, page.err
    assert page.json()["files"] == [{"name": "seen.json", "kind": "coverage"}]
    text = (tmp_path / "page.html").read_text()
    assert "<h1>Profile</h1>" in text and "decode, batch 1" in text
    assert "The remainder: 20.0 µs (20.0%)" in text and "--dtype bfloat16" in text
    coverage["phases"][0]["rows"][0]["us"] = "many"
    (tmp_path / "odd.json").write_text(json.dumps({"schema": 1, "coverage": coverage}))
    for odd in (fl("show", "odd.json"), fl("show", "odd.json", "--html", "page.html")):
        assert (odd.status, odd.out) == (2, "") and "odd.json: incomplete" in odd.err
