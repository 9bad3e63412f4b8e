"""`vllm-fl bisect`: the environment of its engines, its answer and its errors."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Command, Plugin

from vllm_fl_tools.cli import _engines, _parts

ENGINE = """
import json, os, signal, sys, time

import yaml

request = json.loads(sys.argv[-1])
options, is_startup = request["options"], not request["options"]
aside = os.environ.get("VLLM_FL_ENABLED") == "0"
before = len(open(os.path.join("{folder}", "started")).readlines())
exact, is_plan = options.get("dtype") == "float32", before >= 2 and not is_startup
variables = {k: v for k, v in os.environ.items() if "_FL_" in k or "ACME" in k or "CUDA" in k}
file = next((v for n in ("VLLM_FL_CONFIG", "VLLM_FL_OP_CONFIG") if (v := os.environ.get(n))), None)
content = yaml.safe_load(open(file)) or {} if file else {}
with open(os.path.join("{folder}", "started"), "a") as out:
    print(json.dumps([exact, is_plan, variables, content, request["arguments"]]), file=out)
off = content.get("vendor_acme_off", os.environ.get("ACME_OFF", "").split(","))
loaded = os.environ.get("VLLM_FL_PLUGIN_MODULES", "")
on = [name for name in ("add", "mm", "sort", "topk") if loaded and name not in off and not aside]
ops = {"rms_norm": "vendor.acme", "silu_and_mul": "vendor.acme", "moe_sum": "stock"}
if os.environ.get("VLLM_FL_PREFER") == "reference":
    ops = {op: "reference.torch" for op in ops}
if is_plan:
    per_op = os.environ.get("VLLM_FL_PER_OP", "")
    orders = {op: [s] for op, _, s in (each.partition("=") for each in per_op.split(";") if each)}
    orders |= content.get("op_backends", {} if "VLLM_FL_CONFIG" in os.environ else content)
    ops |= {op: order[0].removeprefix("impl:") for op, order in orders.items() if op in ops}
{start}
if not is_startup:
    assert options["enforce_eager"] and os.environ["VLLM_FL_PREFLIGHT"] == "off"
    assert options["max_model_len"] == {length} + 32, options
    assert aside == request["steps_aside"]
report = None if aside else {"ops": {op: {"impl": impl} for op, impl in ops.items()}}
ready = {"report": report, "vocabulary": 50, "length": 99, "graph_tokens": 0}
print(json.dumps(ready), flush=True)
for line in sys.stdin:
    ((kind, given),) = json.loads(line).items()
    is_wrong = (is_plan or is_startup) and ({wrong})
    error = 0 if exact else {error} if is_wrong else 0.01
    tokens = given.get("forced") or [[7] * given["new_tokens"] for _ in given["prompts"]]
    assert all(3 <= token < 50 for ids in given["prompts"] for token in ids)
    prefill = [[-1.0 - error] * (len(ids) - 1) for ids in given["prompts"]]
    decode = [[-1.0 - error] * len(ids) for ids in tokens]
    answer = {"tokens": tokens, "prefill": prefill, "decode": decode}
    print(json.dumps(answer), flush=True)
"""
PLUGIN = """
from vllm_fl import SettingSpec

NAMES = ("add", "mm", "sort", "topk")

@hookimpl
def settings():
    return [
        SettingSpec("vendor_acme_off", "ACME_OFF", (), in_file=True, names="op",
                    known=lambda: NAMES),
        SettingSpec("vendor_acme_tile", "ACME_TILE", "64", in_file=True),
    ]

@hookimpl
def register_ops():
    return [OpImpl("silu_and_mul", "reference.torch", BackendImplKind.REFERENCE, silu_and_mul)]
"""


def listing(plugin: str) -> dict[str, Any]:
    """The result of `_list_parts` for the plugin; the real one takes seconds to import torch."""
    part = {"kind": "name", "of": plugin, "setting": "vendor_acme_off"}
    names = ("add", "mm", "sort", "topk")
    return {
        "enabled": os.environ.get("VLLM_FL_PREFER_ENABLED") != "0",
        "plugins": {plugin: {"release": "acme", "module": True}},
        "lists": {"vendor_acme_off": {"variable": "ACME_OFF", "names": [], "allows": False}},
        "remarks": [],
        "parts": [{**part, "name": name, "what": f"operator {name}"} for name in names],
    }


NORM = "ops['rms_norm'] == 'vendor.acme'"
ENDS_IN_MM = "if 'mm' in on: raise RuntimeError('no such kernel')"


@pytest.fixture
def bisect(fl: Command, plugin: Plugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`bisect(…)`: the command, with engines that behave as configured."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_text("")
    script, name = tmp_path / "engine.py", plugin(PLUGIN)
    monkeypatch.setattr(_engines, "COMMAND", (sys.executable, str(script)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    def run(
        *arguments: str,
        wrong: str = "False",
        error: str = "0.05",
        start: str = "",
        length: int = 96,
        real: bool = False,
        **variables: str,
    ) -> Any:
        text = ENGINE.replace("{wrong}", wrong).replace("{error}", error).replace("{start}", start)
        text = text.replace("{folder}", str(tmp_path)).replace("{length}", str(length))
        script.write_text(text)
        (tmp_path / "started").write_text("")
        with monkeypatch.context() as patch:
            if not real:
                patch.setattr(_parts, "listing", lambda: listing(name))
            return fl("bisect", "--model", "model", *arguments, **variables)

    return run


def started(folder: Path) -> list[Any]:
    """[in float32, of the plan, variables, file, arguments] of each engine since the command."""
    return [json.loads(line) for line in (folder / "started").read_text().splitlines()]


def test_prose(bisect: Any) -> None:
    done = bisect()
    assert done.status == 0, done.err
    assert "starting an engine in float32" in done.err
    assert "differ in rms_norm (vendor.acme), silu_and_mul (vendor.acme).\n" in done.out
    assert "No fault found: plan and baseline return equal log-probabilities.\n3 " in done.out
    done = bisect(wrong="True", error="0.012")
    assert "the median error is 1.20 times as large as in the baseline, and 0 errors" in done.out
    assert "are above 0.013 nats (limit 9).\n3 engines" in done.out
    done = bisect(wrong=NORM)
    assert done.status == 1 and "rms_norm (vendor.acme): is incorrect, on its own" in done.out, (
        done.out
    )
    assert "Settings that exclude it:\n  export VLLM_FL_PER_OP=rms_norm=stock" in done.out
    done = bisect("--startup", start=ENDS_IN_MM)
    assert "operator mm: ends the startup, on its own: RuntimeError: no such kernel" in done.out


def test_the_op_is_found(bisect: Any, tmp_path: Path) -> None:
    answer = bisect("--json", wrong=NORM).json()
    (culprit,) = answer["culprits"]
    assert culprit["parts"] == ["rms_norm"]
    assert answer["status"] == "found" and answer["engines"] == len(started(tmp_path)) == 6
    assert answer["errors"]["baseline"]["decode"] == pytest.approx(0.01)
    assert answer["ops"] == {"rms_norm": "vendor.acme", "silu_and_mul": "vendor.acme"}
    assert answer["times"] == pytest.approx(5)
    assert (answer["far"], answer["far_allowed"]) == (1520, 9)
    answer = bisect("--json", wrong=NORM, error="float('nan')").json()
    assert answer["times"] is None and answer["errors"]["plan"]["prefill"] is None


def test_a_replaced_operator_is_found(bisect: Any) -> None:
    answer = bisect("--json", wrong="'mm' in on").json()
    (culprit,) = answer["culprits"]
    assert culprit["what"] == ["operator mm"] and answer["settings"] == ["export ACME_OFF=mm"]


def test_the_users_orders_hold_for_other_ops(bisect: Any, tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"moe_sum": ["stock"]}))
    bisect(wrong=NORM, VLLM_FL_OP_CONFIG=str(own))
    assert started(tmp_path)[-1][3] == {"moe_sum": ["stock"], "rms_norm": ["stock"]}
    policy = tmp_path / "own.yaml"
    policy.write_text("prefer: vendor\nop_backends:\n  moe_sum: [stock]\n")
    done = bisect(wrong=NORM, VLLM_FL_CONFIG=str(policy))
    orders = {"moe_sum": ["stock"], "rms_norm": ["stock"]}
    assert started(tmp_path)[-1][3] == {"prefer": "vendor", "op_backends": orders}, done.err
    assert yaml.safe_load(policy.read_text())["op_backends"] == {"moe_sum": ["stock"]}


def test_baselines(bisect: Any, tmp_path: Path) -> None:
    done = bisect("--against", "reference", wrong=NORM, VLLM_FL_PER_OP="moe_sum=stock")
    assert done.status == 1, done.err
    exact, baseline, plan, *mixed = started(tmp_path)
    for engine in (exact, baseline):
        assert engine[2]["VLLM_FL_PREFER"] == "reference" and "VLLM_FL_PER_OP" not in engine[2]
    assert plan[2]["VLLM_FL_PER_OP"] == "moe_sum=stock" and "VLLM_FL_PREFER" not in plan[2]
    assert "=impl:reference.torch" in mixed[-1][2]["VLLM_FL_PER_OP"]
    policy = tmp_path / "other.yaml"
    policy.write_text("{}")
    bisect("--against", str(policy))
    exact, baseline, plan = started(tmp_path)
    assert exact[2]["VLLM_FL_ENABLED"] == "0"
    assert baseline[2]["VLLM_FL_CONFIG"] == str(policy) and "VLLM_FL_CONFIG" not in plan[2]


def test_prompts(bisect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_fl_tools.cli import bisect as verb

    monkeypatch.setattr(verb, "_encoded", lambda _, texts: [[3] * len(text) for text in texts])
    file = tmp_path / "prompts"
    file.write_text("[[3, 4, 5], [6, 7, 8, 9]]")
    done = bisect("--prompts", "prompts", length=4)
    assert done.status == 0 and "with fewer than 16 prompts" in done.err
    file.write_text("[INST] Say it.\n\nAnd now?\n")
    assert bisect("--prompts", "prompts", length=14).status == 0
    for content, problem in (
        ("[[3, 99]]", "token 99 is not in the vocabulary of 50 tokens"),
        ("", "has no prompt"),
        ("[[3, 4.5]]", "list of lists of token ids"),
        ("[3]", "list of lists of token ids"),
        ('{"prompts": [[3]]}', "expected one prompt per line, or a JSON list of lists"),
    ):
        file.write_text(content)
        done = bisect("--prompts", "prompts", length=2)
        assert done.status == 2 and problem in done.err


def test_what_ends_a_startup_is_found(bisect: Any, tmp_path: Path) -> None:
    done = bisect("--startup", "--json", "--enforce-eager", start=ENDS_IN_MM, real=True)
    assert done.status == 1, done.err
    found = done.json()
    (culprit,) = found["culprits"]
    assert culprit["parts"] == ["vendor_acme_off mm"] and culprit["how"] == "ended"
    assert found["settings"] == ["export ACME_OFF=mm"]
    engines = started(tmp_path)
    stock, asked, *_ = engines
    assert found["engines"] == len(engines)
    assert stock[2]["VLLM_FL_ENABLED"] == "0" and "ACME_OFF" not in asked[2]
    assert all(each[2]["CUDA_LAUNCH_BLOCKING"] == "1" for each in engines)
    assert all(each[4] == ["--enforce-eager"] for each in engines)
    assert "mm" in [each[2].get("ACME_OFF") for each in engines]


def test_a_neighbour_that_ends_stock_vllm_is_found(bisect: Any, tmp_path: Path) -> None:
    info = tmp_path / "vllm_bolt-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-bolt\nVersion: 1.0\n")
    entries = "bolt = bolt:register\nnut = bolt:nut\n"
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entries}")
    refuses = "raise RuntimeError('it refuses vLLM 0.32')"
    start = f"if 'bolt' in os.environ.get('VLLM_PLUGINS', 'bolt').split(','): {refuses}"
    done = bisect("--startup", start=start, real=True)
    culprit = "vLLM's plugin 'bolt' of vllm-bolt 1.0: ends the startup, on its own: RuntimeError"
    assert f"{culprit}: it refuses vLLM 0.32" in done.out
    (line,) = [line for line in done.out.splitlines() if "VLLM_PLUGINS=" in line]
    left = line.partition("=")[2].split(",")
    assert {"fl", "nut"} <= {*left} and "bolt" not in left
    assert all(each[2].get("VLLM_FL_ENABLED") == "0" for each in started(tmp_path))


@pytest.mark.parametrize(
    ("behaviour", "status", "engines"),
    [
        ({}, "right", 3),
        ({"start": "sys.exit('RuntimeError: no device')"}, "stock", 1),
        ({"wrong": "'topk' in on", "error": "9.0"}, "found", None),
    ],
)
def test_statuses_of_a_startup(
    bisect: Any, tmp_path: Path, behaviour: dict[str, str], status: str, engines: int | None
) -> None:
    done = bisect("--startup", "--json", **behaviour)
    found = done.json()
    assert found["status"] == status and done.status == (status != "right")
    assert found["engines"] == len(started(tmp_path)) and engines in (None, found["engines"])


def test_an_interrupt(bisect: Any) -> None:
    kills = "os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    done = bisect(wrong=NORM, start=f"if is_plan: {kills}")
    assert done.status == 130 and "interrupted after 2 engines" in done.err
    done = bisect("--startup", start=kills)
    assert done.status == 130 and "interrupted after 1 engines" in done.err


def test_usage(bisect: Any, fl: Command, tmp_path: Path) -> None:
    for arguments, variables, problem in (
        (("--against", "stok"), {}, "expected stock, reference or a settings file"),
        ((), {"VLLM_FL_PREFER_ENABLED": "0"}, "so vllm-fl has no plan"),
        (("--against", "reference"), {"VLLM_FL_PLUGIN_MODULES": ""}, "provides a reference"),
        (("--prompts", "nowhere"), {}, "nowhere: cannot be read"),
        (("--enforce-eager",), {}, "vLLM's arguments need --startup"),
        (("--startup", "--prompts", "p"), {}, "use them without --startup"),
    ):
        done = bisect(*arguments, **variables)
        assert done.status == 2 and problem in done.err, arguments
    (tmp_path / "model" / "model.safetensors").unlink()
    assert "it has no weights" in bisect().err
    done = fl("bisect", "--model", "elsewhere")
    assert done.status == 2 and "it is not a folder" in done.err
