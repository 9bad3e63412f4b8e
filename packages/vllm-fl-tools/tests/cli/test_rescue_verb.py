"""`vllm-fl rescue`: what its engines are started with, what it writes and says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import Command, Plugin

from vllm_fl_tools.cli import _engines, _suspects

ENGINE = """
import json, os, signal, sys, time

import yaml

request = json.loads(sys.argv[-1])
aside = os.environ.get("VLLM_FL_PREFER_ENABLED") == "0"
off, content = [], {}
if "VLLM_FL_CONFIG" in os.environ:
    with open(os.environ["VLLM_FL_CONFIG"]) as file:
        content = yaml.safe_load(file) or {}
    off = content.get("vendor_acme_off", [])
loaded = os.environ.get("VLLM_FL_PLUGIN_MODULES", "").split(",")
blocking = os.environ.get("CUDA_LAUNCH_BLOCKING")
with open(os.path.join("{folder}", "started"), "a") as file:
    print(json.dumps([aside, off, loaded, blocking, request["arguments"]]), file=file)
on = [name for name in ("add", "mm", "sort", "topk") if name not in off and loaded != [""]]
if aside:
    {stock}
else:
    {start}
ready = {"report": None, "vocabulary": 50, "length": 99, "graph_tokens": 0}
print(json.dumps(ready), flush=True)
for line in sys.stdin:
    ((kind, told),) = json.loads(line).items()
    n = told["new_tokens"]
    value = float("nan") if not aside and ({wrong}) else -1.0
    prefill = [[value] * (len(ids) - 1) for ids in told["prompts"]]
    decode = [[value] * n for _ in told["prompts"]]
    tokens = [[7] * n for _ in told["prompts"]]
    print(json.dumps({"tokens": tokens, "prefill": prefill, "decode": decode}), flush=True)
"""
ACME = """
from vllm_fl import SettingSpec

NAMES = ("add", "mm", "sort", "topk")

@hookimpl
def settings():
    return [
        SettingSpec(
            "vendor_acme_off", "ACME_OFF", (), in_file=True, names="op", known=lambda: NAMES
        ),
        SettingSpec("vendor_acme_tile", "ACME_TILE", "64", in_file=True),
    ]
"""
LISTING = """
import json, os, sys

tile = {"key": "vendor_acme_tile", "named": "ACME_TILE=9", "variable": "ACME_TILE", "value": "9"}
acme = {"release": "acme", "keys": ["vendor_acme_off", "vendor_acme_tile"], "module": True}
off = {"plugin": "{plugin}", "key": "vendor_acme_off", "what": "op", "whitelist": None}
off |= {"variable": None, "whitelisted": None, "names": ["add", "mm", "sort", "topk"]}
told = {"enabled": True, "plugins": {"{plugin}": acme}, "ops": [], "lists": [off]}
told |= {"settings": [tile] if "ACME_TILE" in os.environ else [], "remarks": []}
told |= {"file": {"vendor_acme_tile": "9"} if "ACME_TILE" in os.environ else {}}
told |= {"covered": ["ACME_OFF", "ACME_TILE"], "environment": {"torch": "2.13.0"}}
with open(sys.argv[1], "w") as file:
    json.dump(told, file)
"""
"""What `_listing` says of the plugin: it loads torch, for seconds."""

ENDS_IN_MM = "if 'mm' in on: sys.exit('RuntimeError: no such kernel')"


@pytest.fixture
def rescue(fl: Command, plugin: Plugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`rescue(…)`: the command, with engines that behave as told."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    script = tmp_path / "engine.py"
    monkeypatch.setattr(_engines, "COMMAND", (sys.executable, str(script)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    name = plugin(ACME)

    listing = tmp_path / "listing.py"
    listing.write_text(LISTING.replace("{plugin}", name))

    def run(
        *arguments: str,
        real: bool = False,
        start: str = "pass",
        stock: str = "pass",
        wrong: str = "False",
        **variables: str,
    ) -> Any:
        text = ENGINE.replace("{start}", start).replace("{wrong}", wrong).replace("{stock}", stock)
        script.write_text(text.replace("{folder}", str(tmp_path)))
        (tmp_path / "started").write_text("")
        with monkeypatch.context() as patch:
            if not real:
                patch.setattr(_suspects, "COMMAND", (sys.executable, str(listing)))
            return fl("rescue", "--model", "model", *arguments, **variables)

    run.plugin = name  # type: ignore[attr-defined]
    return run


def started(folder: Path) -> list[Any]:
    """[steps aside, names off, modules, whether launches block, arguments] of each engine."""
    return [json.loads(line) for line in (folder / "started").read_text().splitlines()]


def test_what_ends_a_start_is_named_and_the_settings_without_it_are_written(
    rescue: Any, fl: Command, tmp_path: Path
) -> None:
    answer = rescue("--json", "--enforce-eager", start=ENDS_IN_MM, real=True)
    assert answer.status == 1, answer.err
    told = answer.json()
    (culprit,) = told["culprits"]
    assert culprit["parts"] == ["vendor_acme_off mm"] and culprit["how"] == "ended"
    engines = started(tmp_path)
    assert told["starts"] == len(engines)
    stock, asked, *_ = engines
    assert stock[0] and not asked[0] and asked[1] == []
    assert all(each[3] == "1" and each[4] == ["--enforce-eager"] for each in engines)
    assert [False, ["mm"], [rescue.plugin]] in [each[:3] for each in engines]
    written = (tmp_path / told["file"]).read_text()
    assert "- mm  # " in written
    policy = fl("policy", "--json", VLLM_FL_CONFIG=told["file"])
    values = {row["key"]: row["value"] for row in policy.json()["settings"]}
    assert values["vendor_acme_off"] == ["mm"]
    report = (tmp_path / told["report"]).read_text()
    assert "op mm" in report and "vllm serve model --enforce-eager" in report
    assert sorted(path.name for path in tmp_path.glob("vllm-fl-rescue*")) == [
        "vllm-fl-rescue.md",
        "vllm-fl-rescue.yaml",
    ]


def test_an_output_that_is_there_is_one_line_and_starts_nothing(
    rescue: Any, tmp_path: Path
) -> None:
    (tmp_path / "there.yaml").write_text("mine")
    done = rescue("--out", "there.yaml")
    assert done.status == 2 and len(done.err.splitlines()) == 1
    assert (tmp_path / "there.yaml").read_text() == "mine" and started(tmp_path) == []
    assert rescue("--out", "there.md").status == 2 and started(tmp_path) == []


def test_a_model_that_is_not_there_is_one_line(fl: Command) -> None:
    done = fl("rescue", "--model", "elsewhere")
    assert done.status == 2 and len(done.err.splitlines()) == 1


def test_stock_that_fails_has_a_status_of_its_own(rescue: Any, tmp_path: Path) -> None:
    done = rescue(stock="sys.exit('RuntimeError: no device')")
    assert done.status == 3, done.err
    assert len(started(tmp_path)) == 1 and not [*tmp_path.glob("vllm-fl-rescue*")]


def test_nothing_fails(rescue: Any, tmp_path: Path) -> None:
    done = rescue()
    assert done.status == 0, done.err
    assert "Nothing fails" in done.out and "3 engine starts" in done.out
    assert [each[3] for each in started(tmp_path)] == ["1", "1", None]
    assert not [*tmp_path.glob("vllm-fl-rescue*")]


def test_a_start_that_is_wrong_is_named(rescue: Any) -> None:
    told = rescue("--json", wrong="'topk' in on").json()
    (culprit,) = told["culprits"]
    assert culprit["parts"] == ["vendor_acme_off topk"] and culprit["how"] == "wrong"


def test_it_is_interrupted_cleanly(rescue: Any, tmp_path: Path) -> None:
    kills = "os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    done = rescue(start=kills)
    assert done.status == 130, done.err
    assert "interrupted after 1 starts" in done.err
    assert not [*tmp_path.glob("vllm-fl-rescue*")]


def test_a_setting_of_a_plugin_s_is_named_by_its_variable(rescue: Any) -> None:
    ends = "(content or os.environ).get('vendor_acme_tile', os.environ.get('ACME_TILE'))"
    start = f"if {ends} == '9': sys.exit('RuntimeError: no such kernel')"
    told = rescue("--json", start=start, ACME_TILE="9").json()
    (culprit,) = told["culprits"]
    assert culprit["parts"] == ["setting vendor_acme_tile"] and "ACME_TILE=9" in culprit["said"]
