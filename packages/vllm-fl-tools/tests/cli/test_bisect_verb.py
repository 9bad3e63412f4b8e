"""`vllm-fl bisect`: what its engines are started with, and what it says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Command, Plugin

from vllm_fl_tools.cli import _engines

ENGINE = """
import json, os, signal, sys, time

import yaml

request = json.loads(sys.argv[-1])
options = request["options"]
assert options["enforce_eager"] and os.environ["VLLM_FL_PREFLIGHT"] == "off"
assert options["max_model_len"] == {length} + 32, options
exact = options["dtype"] == "float32"
is_plan = "worker_extension_cls" in options
aside = request["steps_aside"]
assert aside == (os.environ.get("VLLM_FL_PREFER_ENABLED") == "0")
ops = {"rms_norm": "vendor.acme", "silu_and_mul": "vendor.acme", "moe_sum": "stock"}
if os.environ.get("VLLM_FL_PREFER") == "reference":
    ops = {op: "reference.torch" for op in ops}
text = "{}"
for name in ("VLLM_FL_OP_CONFIG", "VLLM_FL_CONFIG"):
    if name in os.environ:
        with open(os.environ[name]) as file:
            text = file.read()
with open(os.path.join("{folder}", "started"), "a") as file:
    told = [exact, is_plan, {k: v for k, v in os.environ.items() if k.startswith("VLLM_FL_")}, text]
    print(json.dumps(told), file=file)
if text != "{}" and is_plan:
    lists = yaml.safe_load(text)
    lists = lists.get("op_backends", lists)
    ops |= {op: token[0].removeprefix("impl:") for op, token in lists.items()}
{start}
report = None if aside else {"ops": {op: {"impl": impl} for op, impl in ops.items()}}
ready = {"report": report, "vocabulary": 50, "length": 99, "graph_tokens": 0}
print(json.dumps(ready), flush=True)
away = set()
for line in sys.stdin:
    ((kind, told),) = json.loads(line).items()
    if kind == "layers":
        answer = {"layers": {"model.0": 1, "model.1": 2}}
    elif kind == "leave":
        away, answer = set(told["layers"]), {}
    else:
        is_wrong = is_plan and ({wrong})
        error = 0 if exact else {error} if is_wrong else 0.01
        tokens = told["forced"] or [[7] * told["new_tokens"] for _ in told["prompts"]]
        assert all(3 <= token < 50 for ids in told["prompts"] for token in ids)
        prefill = [[-1.0 - error] * (len(ids) - 1) for ids in told["prompts"]]
        decode = [[-1.0 - error] * len(ids) for ids in tokens]
        answer = {"tokens": tokens, "prefill": prefill, "decode": decode}
    print(json.dumps(answer), flush=True)
"""
PLAIN = """
@hookimpl
def register_ops():
    return [OpImpl("silu_and_mul", "reference.torch", BackendImplKind.REFERENCE, silu_and_mul)]
"""
NORM = "ops['rms_norm'] == 'vendor.acme' and 'model.1' not in away"


@pytest.fixture
def bisect(fl: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`bisect(…)`: the command, with engines that behave as told."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_text("")
    script = tmp_path / "engine.py"
    monkeypatch.setattr(_engines, "COMMAND", (sys.executable, str(script)))
    monkeypatch.chdir(tmp_path)

    def run(
        *arguments: str,
        wrong: str = "False",
        error: str = "0.05",
        start: str = "",
        length: int = 96,
        **variables: str,
    ) -> Any:
        text = ENGINE.replace("{wrong}", wrong).replace("{error}", error).replace("{start}", start)
        text = text.replace("{folder}", str(tmp_path)).replace("{length}", str(length))
        script.write_text(text)
        (tmp_path / "started").write_text("")
        return fl("bisect", "--model", "model", *arguments, **variables)

    return run


def started(folder: Path) -> list[Any]:
    """[in float32, of the plan, its variables, its lists] of each engine since the command."""
    return [json.loads(line) for line in (folder / "started").read_text().splitlines()]


def test_a_right_plan_is_noise(bisect: Any, tmp_path: Path) -> None:
    done = bisect()
    assert done.status == 0, done.err
    assert (
        "Noise: the plan's median error is 1.00 times the baseline's (1.5 are allowed)" in done.out
    )
    assert "and 0 tokens are far off (10 may be). 3 engines" in done.out
    assert "differ in rms_norm (vendor.acme), silu_and_mul (vendor.acme).\n" in done.out
    assert "starting an engine in float32" in done.err
    assert [(exact, is_plan) for exact, is_plan, *_ in started(tmp_path)] == [
        (True, False),
        (False, False),
        (False, True),
    ]


def test_a_plan_that_is_the_baseline_s_is_told_so(bisect: Any, plugin: Plugin) -> None:
    """Somebody who forgot the settings is not to take it for a proof that they are right."""
    plugin(PLAIN)
    done = bisect("--against", "reference", VLLM_FL_PREFER="reference")
    assert done.status == 0, done.err
    assert "Plan and baseline differ in no op.\nNoise: " in done.out


def test_op_and_layer_are_named(bisect: Any, tmp_path: Path) -> None:
    done = bisect(wrong=NORM)
    assert done.status == 1, done.err
    assert "rms_norm (vendor.acme): 5.00 times, 0 tokens are far off (10 may be), by" in done.out
    assert "in layer model.1 (which 2 places share)" in done.out
    assert "silu_and_mul (vendor.acme):" not in done.out
    answer = bisect("--json", wrong=NORM).json()
    (culprit,) = answer["culprits"]
    assert culprit["ops"] == {"rms_norm": "vendor.acme"} and culprit["layers"] == [["model.1"]]
    assert answer["engines"] == len(started(tmp_path)) == 5
    assert answer["errors"]["baseline"]["decode"] == pytest.approx(0.01)
    assert answer["ops"] == {"rms_norm": "vendor.acme", "silu_and_mul": "vendor.acme"}
    assert not answer["elsewhere"] and answer["times"] == pytest.approx(5)
    assert (
        (answer["far"], answer["far_allowed"])
        == (culprit["far"], culprit["far_allowed"])
        == (0, 10)
    )


def test_what_is_not_finite_is_null(bisect: Any) -> None:
    answer = bisect("--json", wrong=NORM, error="float('nan')").json()
    assert answer["times"] is None and answer["culprits"][0]["times"] is None
    assert answer["errors"]["plan"] == {"prefill": None, "decode": None}


def test_the_lists_of_the_user_hold_for_the_ops_that_are_not_left(
    bisect: Any, tmp_path: Path
) -> None:
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"moe_sum": ["stock"], "silu_and_mul": ["vendor"]}))
    done = bisect(wrong=NORM, VLLM_FL_OP_CONFIG=str(own))
    assert done.status == 1 and "rms_norm (vendor.acme)" in done.out, done.err
    *_, mixed = started(tmp_path)
    assert json.loads(mixed[3]) == {"moe_sum": ["stock"], "silu_and_mul": ["vendor"]} | {
        "rms_norm": ["stock"]
    }
    assert own.read_text() == json.dumps({"moe_sum": ["stock"], "silu_and_mul": ["vendor"]})

    policy = tmp_path / "own.yaml"
    policy.write_text("prefer: vendor\nop_backends:\n  moe_sum: [stock]\n")
    done = bisect(wrong=NORM, VLLM_FL_CONFIG=str(policy))
    assert done.status == 1 and "rms_norm (vendor.acme)" in done.out, done.err
    *_, mixed = started(tmp_path)
    content = yaml.safe_load(mixed[3])
    assert content["prefer"] == "vendor"
    assert content["op_backends"] == {"moe_sum": ["stock"], "rms_norm": ["stock"]}


def test_it_compares_with_what_it_is_told(bisect: Any, plugin: Plugin, tmp_path: Path) -> None:
    plugin(PLAIN)
    done = bisect("--against", "reference", wrong=NORM, VLLM_FL_PER_OP="moe_sum=stock")
    assert done.status == 1, done.err
    exact, baseline, plan, *mixed = started(tmp_path)
    for engine in (exact, baseline):
        assert engine[2]["VLLM_FL_PREFER"] == "reference" and "VLLM_FL_PER_OP" not in engine[2]
    assert plan[2]["VLLM_FL_PER_OP"] == "moe_sum=stock" and "VLLM_FL_PREFER" not in plan[2]
    assert all({*t} == {"impl:reference.torch"} for m in mixed for t in json.loads(m[3]).values())

    policy = tmp_path / "other.yaml"
    policy.write_text("{}")
    done = bisect("--against", str(policy))
    exact, baseline, plan = started(tmp_path)
    assert exact[2]["VLLM_FL_PREFER_ENABLED"] == "0"
    assert baseline[2]["VLLM_FL_CONFIG"] == str(policy)
    assert "VLLM_FL_CONFIG" not in plan[2]


def test_prompts_may_be_token_ids(bisect: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("[3, 4, 5]\n\n[6, 7, 8, 9]\n")
    assert bisect("--prompts", "prompts", length=4).status == 0
    file.write_text("[3, 99]\n")
    done = bisect("--prompts", "prompts", length=2)
    assert done.status == 2 and "99 is no token of the model, which has 50" in done.err
    for content, words in (
        ("", "has no prompt"),
        ("[3, 4", "no JSON list of token ids"),
        ("[3, 4.5]", "no JSON list of token ids"),
        ("[[3], [4]]", "no JSON list of token ids"),
        ("[]", "no JSON list of token ids"),
    ):
        file.write_text(content)
        done = bisect("--prompts", "prompts")
        assert done.status == 2 and words in done.err
        assert started(tmp_path) == []


def test_prompts_may_be_text(bisect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_fl_tools.cli import bisect as verb

    def encoded(model: str, texts: list[str]) -> list[list[int]]:
        assert (model, texts) == ("model", ["[INST] Say it.", "And now?"])
        return [[4, 5, 6, 7, 8], [9]]

    monkeypatch.setattr(verb, "_encoded", encoded)
    (tmp_path / "prompts").write_text("[INST] Say it.\n[3, 4]\nAnd now?\n")
    done = bisect("--prompts", "prompts", length=5)
    assert done.status == 0, done.err
    assert "--prompts prompts: by fewer than 16 prompts a right plan may be named" in done.err


def test_it_is_interrupted_cleanly(bisect: Any, tmp_path: Path) -> None:
    kills = "if is_plan: os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    done = bisect(wrong=NORM, start=kills)
    assert done.status == 130, done.err
    assert "interrupted after 2 engines" in done.err
    assert len(started(tmp_path)) == 3


def test_usage(bisect: Any, fl: Command, tmp_path: Path) -> None:
    done = bisect("--against", "stok")
    assert done.status == 2 and "expected stock, reference or a policy file" in done.err
    done = bisect(VLLM_FL_PREFER_ENABLED="0")
    assert done.status == 2 and "there is no plan" in done.err
    done = bisect("--against", "reference", VLLM_FL_PLUGINS="")
    assert done.status == 2 and "brings plain forms" in done.err
    done = bisect("--prompts", "nowhere")
    assert done.status == 2 and "nowhere: cannot be read" in done.err
    (tmp_path / "model" / "model.safetensors").unlink()
    done = bisect()
    assert done.status == 2 and "it has no weights" in done.err
    done = fl("bisect", "--model", "elsewhere")
    assert done.status == 2 and "it is no folder" in done.err
