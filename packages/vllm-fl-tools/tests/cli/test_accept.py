"""`vllm-fl tune --accept`: the basis of its verdict."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import Command

from vllm_fl_tools.cli import _engines
from vllm_fl_tools.cli._accept import DEFAULT, PHASES, TABLED, Served, judged
from vllm_fl_tools.engine.tuning_table import Row, Tuned, TunedOp

ROWS = (Row(8, "vendor.acme"), Row(64, "default"))
TABLE = Tuned(
    mode="eager",
    dtype="bfloat16",
    sizes={"hidden": 1024},
    model="tiny",
    date="2026-11-22T17:00:00+00:00",
    seconds=12.5,
    holds={"device": "cpu", "distributions": {}},
    ops={"rms_norm": TunedOp("stock", ROWS)},
)
SLOWEST = "prefill, 256 tokens"

ENGINE = """
import json, os, sys
configured = "VLLM_FL_CONFIG" in os.environ
tabled = configured or "VLLM_FL_TABLE" in os.environ
assert json.loads(sys.argv[-1])["arguments"] == ["--enforce-eager"]
table = {"acts": {acts}, "reason": "The table has no effect: device is H200", "file": {file}}
digest = "d" + {plan} + "t" * (tabled and {acts})
report = {"digest": digest, "table": table if tabled - configured or {both} else None}
ready = {"report": report, "vocabulary": 50, "graph_tokens": {graphs}, "length": {length}}
print(json.dumps(ready), flush=True)
for line in sys.stdin:
    visit = json.loads(line)["visit"]
    assert visit["seed"]
    seconds = {tabled} if tabled else 0.01
    assert visit["repeated"] == (visit["new_tokens"] > 1 and "again" not in visit["seed"])
    tokens = [visit["batch"], visit["seed"], {tokens}]
    assert visit["times"] == 1 or visit["new_tokens"] == 1 and "again" not in visit["seed"]
    steps = [seconds] * visit["new_tokens"] * visit["times"]
    print(json.dumps({"tokens": tokens, "steps": steps}), flush=True)
"""


def served(tabled: float, **changed: Any) -> Served:
    """Four rounds; the slowest prefill with the table takes `tabled` seconds."""
    seconds = {(name, phase): [1.0] * 4 for name in (DEFAULT, TABLED) for phase in PHASES}
    seconds[TABLED, SLOWEST] = [tabled, tabled, tabled, 2.0]  # one round is disturbed
    fields: dict[str, Any] = {"tokens": [[[1, 2]], [[1, 2]]], "digests": ["aa", "aa"]}
    return Served(seconds, **{**fields, **changed})


def test_it_is_accepted_where_no_phase_is_slower() -> None:
    verdict = judged(served(1 / 0.98))
    assert verdict.accepted and "at least 0.980" in verdict.reason
    assert verdict.figures["rounds"] == 4
    assert verdict.figures[f"{SLOWEST}: ratio"] == pytest.approx(0.98)
    assert verdict.figures[f"{SLOWEST}: low"] < 0.98 <= verdict.figures[f"{SLOWEST}: high"] + 1e-9


def test_it_is_not_where_one_is_slower_or_it_is_not_reproduced() -> None:
    for case, words in (
        (served(1 / 0.97), f"slower: {SLOWEST} at 0.970"),
        (served(1.0, tokens=[[[1, 2]], [[1, 3]]]), "with different tokens"),
        (served(1.0, digests=["aa", "bb"]), r"different plans (aa, bb)"),
    ):
        verdict = judged(case)
        assert not verdict.accepted and words in verdict.reason
        assert f"{SLOWEST}: ratio" in verdict.figures


def test_where_the_rounds_differ_too_much_to_be_sure_it_says_so() -> None:
    sure = judged(served(1 / 0.97))
    assert "more --rounds" not in sure.reason
    seconds = served(1 / 0.97).seconds
    noisy = {**seconds, (TABLED, SLOWEST): [1.1, 1.05, 1.03, 0.9]}
    verdict = judged(replace(served(1.0), seconds=noisy))
    assert not verdict.accepted
    assert verdict.reason.startswith(f"slower: {SLOWEST}")
    assert f"to be certain in {SLOWEST}: use an idle machine, or more --rounds" in verdict.reason


@pytest.fixture
def accept(fl: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`accept(…)`: the command, with engines that behave as given; returns its table's path too."""
    path = tmp_path / "table.yaml"
    path.write_text(TABLE.text, encoding="utf-8")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    script = tmp_path / "engine.py"
    monkeypatch.setattr(_engines, "COMMAND", (sys.executable, str(script)))

    def run(*arguments: str, **behaviour: str) -> Any:
        plain = {
            "acts": "True",
            "file": f"{str(path)!r}",
            "both": "False",
            "plan": "''",
            "tabled": "0.005",
            "tokens": "0",
            "graphs": "0",
            "length": "2048",
        }
        text = ENGINE
        for name, value in (plain | behaviour).items():
            text = text.replace(f"{{{name}}}", value)
        script.write_text(text)
        model = ("--model", str(tmp_path / "model"), "--rounds", "4", "--enforce-eager")
        return path, fl("tune", "--accept", str(path), *model, *arguments)

    return run


@pytest.mark.parametrize(
    ("graphs", "length", "prompt"), [(512, 2048, 1024), (4096, 2048, 2047), (512, 1000, 999)]
)
def test_where_graphs_are_captured_a_prompt_is_larger_than_any(
    accept: Any, graphs: int, length: int, prompt: int
) -> None:
    _, done = accept("--json", graphs=str(graphs), length=str(length))
    figures = done.json()["figures"]
    assert figures[f"prefill, {prompt} tokens: ratio"] == pytest.approx(2.0)


def test_both_starts_are_asked_for_the_same(accept: Any, tmp_path: Path) -> None:
    """In the second startup, prefills beyond the graphs used to be single ones, of milliseconds."""
    log = tmp_path / "visits"
    noted = f"open({str(log)!r}, 'a').write(json.dumps(visit) + chr(10)) and 0"
    _, done = accept(tokens=noted, graphs="512")
    assert done.status == 0, done.err
    visits = [json.loads(line) for line in log.read_text().splitlines()]
    for phase in (*PHASES, "prefill, 1024 tokens"):
        timed = [visit for visit in visits if visit["seed"] == f"{phase} 0 0"]
        assert len(timed) == 4, "two engines, started twice"
        assert timed == [timed[0]] * 4 and max(timed[0]["times"], timed[0]["new_tokens"]) == 16


def test_the_engines_take_turns_within_a_round(accept: Any, tmp_path: Path) -> None:
    """A change of the machine's speed for half a second must affect both."""
    log = tmp_path / "visits"
    noted = f"open({str(log)!r}, 'a').write(f\"{{tabled:d}} {{visit['seed']}}\\n\") and 0"
    _, done = accept(tokens=noted)
    assert done.status == 0, done.err
    visits = [line.split(" ", 1) for line in log.read_text().splitlines()]
    for number, first in ((0, "1"), (1, "0")):
        turns = [who for who, seed in visits if seed.startswith(f"{SLOWEST} {number} ")][:8]
        other = {"0": "1", "1": "0"}[first]
        assert turns == [first, other, other, first] * 2


def test_what_differs_from_start_to_start_is_not_reproduced(accept: Any) -> None:
    for behaviour, words in (
        ({"tokens": "os.getpid()"}, "different tokens"),
        ({"plan": "str(os.getpid())"}, "different plans"),
    ):
        _, done = accept(**behaviour)
        assert done.status == 1 and words in done.out


def test_a_table_without_effect_is_refused(accept: Any) -> None:
    for behaviour, words in (
        ({"acts": "False"}, "The table has no effect: device is H200"),
        ({"acts": "sys.exit('no engine')"}, "no engine"),
        ({"file": "'another'", "acts": "False"}, "The table is ignored: VLLM_FL_CONFIG"),
        ({"both": "True"}, "The table is ignored: VLLM_FL_CONFIG"),
        ({"plan": "('' if tabled else 't')"}, "The plan is the same with"),
    ):
        path, done = accept(**behaviour)
        assert done.status == 1 and words in done.err
        assert path.read_text() == TABLE.text
        if behaviour == {"acts": "False"}:
            assert done.err.count("starting an engine") == 1


def test_a_settings_file_is_compared_like_a_table(accept: Any) -> None:
    path, _ = accept("--rounds", "1")
    path.write_text("extends: platform\nop_backends:\n  int8_linear: [vendor, stock]\n")
    assert f"The file {path} is accepted" in accept()[1].out
    path.write_text("op_backend: {}\n")
    assert "'op_backends'" in accept()[1].err


def test_sigterm_ends_the_engines(accept: Any, tmp_path: Path) -> None:
    seen = tmp_path / "engines"
    noted = f"open({str(seen)!r}, 'a').write(f'{{os.getpid()}}\\n') and os.kill(os.getppid(), 15)"
    _, done = accept(tokens=noted)
    assert done.status == 130 and "interrupted" in done.err
    for pid in seen.read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_usage(accept: Any, fl: Command, tmp_path: Path) -> None:
    path, done = accept("--rounds", "1")
    assert done.status == 2 and "--rounds 1" in done.err
    done = fl("tune", "--accept", str(path), "--model", str(tmp_path))
    assert done.status == 2 and "has no config.json" in done.err
    done = fl("tune", "--accept", str(path))
    assert done.status == 2 and "--model DIR" in done.err
    done = fl("tune", "--model", "tiny", "--rounds", "3")
    assert done.status == 2 and "--rounds is for --accept" in done.err
    path.write_text(path.read_text()[:-20])
    assert fl("tune", "--accept", str(path), "--model", str(tmp_path)).status == 2
