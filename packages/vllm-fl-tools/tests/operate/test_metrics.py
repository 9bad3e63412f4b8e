"""The metrics file: its format, one per rank, written atomically, never blocking."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from builders import X, managing, planning, refusing, silu
from of_acme import silu_and_mul

from vllm_fl_tools.operate import state_file
from vllm_fl_tools.operate.metrics import exposition, metrics_file
from vllm_fl_tools.operate.report_file import log_last_states
from vllm_fl_tools.operate.state_file import StateFile, of_worker
from vllm_fl_verify.shadow import Shadow

OP = "silu_and_mul"
ORDERED = {OP: ["vendor", "reference"]}
WHOSE = {"engine": "vllm", "dp": "0", "rank": "0"}
DOCS = Path(__file__).parents[4] / "docs"

needs_parser = pytest.mark.skipif(
    find_spec("prometheus_client") is None, reason="prometheus_client is not installed"
)


def planned() -> Any:
    """A plan with a first choice that never supports a call, and its bound function."""
    impls = refusing("vendor.acme", "no"), silu("reference.torch")
    plan = planning(managing(*impls, per_op_order=ORDERED), "eager")
    return plan, plan.bind(OP, object(), frozenset())


def read(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Sample's name -> labels -> value, by Prometheus' own client; each sample occurs once."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families), "a family in two pieces"
    for family in families:
        assert family.documentation and family.type in ("gauge", "counter"), family
        for sample in family.samples:
            assert sample.timestamp is None, "the collector refuses a file with times in it"
            assert sample.name.endswith("_total") == (family.type == "counter")
            series = found.setdefault(sample.name, {})
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in series, sample
            series[labels] = sample.value
    return found


def value(text: str, name: str, **labels: str) -> float:
    """The only sample of this name with these labels."""
    series = read(text)[name]
    (found,) = (v for key, v in series.items() if labels.items() <= dict(key).items())
    return found


@needs_parser
def test_it_is_prometheus_text_and_holds_the_plan_and_its_counters() -> None:
    plan, bound = planned()
    before = exposition(plan, "f00d", WHOSE)
    assert value(before, "vllm_fl_lock_differs") == 0
    assert value(exposition(plan, "f00d", WHOSE, lock_differs=True), "vllm_fl_lock_differs") == 1
    assert value(before, "vllm_fl_refusals_total", op=OP, impl="vendor.acme") == 0
    for _ in range(3):
        bound(X)
    plan.record.demote(OP, "vendor.other", "failed at startup on rank 0: it is incorrect")
    after = exposition(plan, "f00d", WHOSE)
    assert value(after, "vllm_fl_refusals_total", op=OP, impl="vendor.acme") == 3
    assert value(after, "vllm_fl_fallbacks_total", op=OP, impl="reference.torch") == 3
    assert value(after, "vllm_fl_demoted", op=OP, impl="vendor.other") == 1
    serves = {**WHOSE, "op": OP, "impl": "vendor.acme", "mode": "eager", "digest": "f00d"}
    assert value(after, "vllm_fl_plan_info", **serves) == 1
    assert "vllm_fl_calls_total" not in read(after), "calls are not counted"


@needs_parser
def test_quantised_layers_are_counted_by_class() -> None:
    plain = {"op": None, "impl": None, "class": "UnquantizedLinearMethod", "layers": 1}
    own = {"op": "int8_linear", "impl": "vendor.acme", "class": "Int8", "layers": 8}
    text = exposition(planned()[0], "f00d", WHOSE, kernels=[plain, own])
    found = {"op": "int8_linear", "impl": "vendor.acme", "class": "Int8"}
    assert value(text, "vllm_fl_linear_layers", **found) == 8
    assert value(text, "vllm_fl_linear_layers", op="", impl="stock.vllm") == 1


@needs_parser
def test_calls_are_there_where_they_are_counted_and_a_label_may_hold_anything() -> None:
    plan = dataclasses.replace(planned()[0], counts_calls=True)
    plan.bind(OP, object(), frozenset())(X)
    odd = 'a "quoted" name\nand back\\slash\\n {a,b=c} # 1'
    text = exposition(plan, "f00d", {**WHOSE, "engine": odd})
    assert value(text, "vllm_fl_calls_total", op=OP, impl="reference.torch", engine=odd) == 1
    assert len(read(text)["vllm_fl_calls_total"]) == 1, "only the implementation that computed"


@needs_parser
def test_what_a_shadow_saw_is_there_by_size() -> None:
    def drifting(x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(x) + (len(x) > 1)

    order = {OP: ["vendor"]}
    plan = planning(managing(silu("vendor.acme", fn=drifting), per_op_order=order), "eager")
    bound, shadow = plan.bind(OP, object(), frozenset()), Shadow(plan, 1.0)
    with shadow.comparing():
        for tokens in (1, 5, 7):
            bound(torch.randn(tokens, 8))
        assert 'tokens="8"' not in exposition(plan, "f00d", WHOSE, shadow.report()), (
            "it reads no device"
        )
    text = exposition(plan, "f00d", WHOSE, shadow.report())
    of = {"op": OP, "impl": "vendor.acme"}
    assert value(text, "vllm_fl_shadow_calls_total", **of, tokens="8") == 2
    assert value(text, "vllm_fl_shadow_wrong_total", **of, tokens="8") == 2
    assert value(text, "vllm_fl_shadow_worst_share", **of, tokens="8") > 1
    assert value(text, "vllm_fl_shadow_wrong_total", **of, tokens="1") == 0


def test_the_documentation_and_its_alerts_name_what_is_written() -> None:
    plan = dataclasses.replace(planned()[0], counts_calls=True)
    text = exposition(plan, "f00d", WHOSE, Shadow(plan, 1.0).report())
    written = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    listed = (DOCS / "worker-report.md").read_text().partition("\n## Metrics\n")[2]
    assert set(re.findall(r"\bvllm_fl_\w+", listed)) - {"vllm_fl_report"} == written
    page = (DOCS / "metrics.md").read_text()
    assert set(re.findall(r"\bvllm_fl_\w+", page)) <= written
    (group,) = yaml.safe_load((DOCS / "prometheus" / "alerts.yml").read_text())["groups"]
    watched = {name for rule in group["rules"] for name in named(rule["expr"])}
    least = ("fallbacks_total", "demoted", "shadow_wrong_total", "lock_differs")
    assert {f"vllm_fl_{name}" for name in least} <= watched
    board = json.loads((DOCS / "prometheus" / "grafana.json").read_text())
    shown = {n for panel in board["panels"] for t in panel["targets"] for n in named(t["expr"])}
    assert watched <= written and shown <= written
    assert all(f"| `{rule['alert']}` |" in page for rule in group["rules"])
    assert all(set(rule["annotations"]) == {"summary", "description"} for rule in group["rules"])
    # A dashboard without data must not look healthy.
    assert "vector(" not in json.dumps(board)


def named(expression: str) -> list[str]:
    return re.findall(r"\bvllm_fl_\w+", expression)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_the_alerts_fire_when_they_should() -> None:
    rules = Path(__file__).with_name("alerts_test.yml")
    subprocess.run(["promtool", "test", "rules", str(rules)], check=True)


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., StateFile]]:
    """`writing(path, …)`: a file of a plan, written all the time, closed at the end."""
    monkeypatch.setattr(state_file, "INTERVAL", 0.01)
    files: list[StateFile] = []

    def started(path: Path, **options: Any) -> StateFile:
        plan = options.get("plan") or planned()[0]
        engine: Any = SimpleNamespace(
            plan=plan,
            digest="f00d",
            rank=0,
            replica=0,
            facts=SimpleNamespace(settings=SimpleNamespace(shadow=None)),
            state={},
        )
        files.append(metrics_file(engine, str(path), lambda: []))
        return files[-1]

    yield started
    for file in files:
        file.close()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "vllm_fl.engine"]


def until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def test_no_two_workers_have_a_file_in_common() -> None:
    paths = [of_worker("vllm.prom", rank, replica) for rank in (0, 1) for replica in (0, 1)]
    names = [str(path) for path in paths]
    assert names == [
        *("vllm.rank0.prom", "vllm.dp1.rank0.prom", "vllm.rank1.prom", "vllm.dp1.rank1.prom")
    ]


@needs_parser
def test_who_reads_it_finds_it_whole_and_may_read_it(
    tmp_path: Path, writing: Callable[..., StateFile]
) -> None:
    plan, bound = planned()
    file = writing(tmp_path / "vllm.prom", plan=plan)
    until(file.path.exists, "it is written")
    with file.path.open() as opened:
        bound(X)
        until(
            lambda: 'impl="vendor.acme",op="silu_and_mul",rank="0"} 1.0\n' in file.path.read_text(),
            "it is written again",
        )
        old = opened.read()
    assert value(old, "vllm_fl_refusals_total", op=OP, impl="vendor.acme") == 0
    mask = os.umask(0)
    os.umask(mask)
    assert file.path.stat().st_mode & 0o777 == 0o666 & ~mask, "the collector is another user"


@pytest.mark.parametrize("stays", [False, True])
def test_a_file_is_written_at_once_when_what_is_so_has_changed(tmp_path: Path, stays: bool) -> None:
    path, now = tmp_path / "chat.json", {"state": "starting"}
    file = StateFile(path, path, lambda: json.dumps(now), stays=stays)
    until(path.exists, "it is written")
    now["state"] = "serving"
    file.renew()
    until(lambda: json.loads(path.read_text()) == now, "it is written again")
    now["state"] = "ended"
    file.close()
    assert path.exists() == stays and (not stays or json.loads(path.read_text()) == now)


def test_the_last_line_says_which_ranks_wrote_their_last_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vllm_fl")
    states = {"": "ended", ".rank1": "serving", ".rank2": "serving"}
    for rank, (name, state) in enumerate(states.items()):
        content = {"rank": rank, "state": state, "written": "12:03:05"}
        (tmp_path / f"chat.report{name}.json").write_text(json.dumps(content))
    os.utime(tmp_path / "chat.report.rank2.json", (1, 1))  # of an earlier engine
    (tmp_path / "chat.report.rank3.json").write_text("{")
    log_last_states(str(tmp_path / "chat.prom"), 2.0)
    ended, killed = said(caplog)
    assert ended.startswith("rank 0 has ended") and str(tmp_path / "chat.report.json") in ended
    assert killed.startswith("rank 1 was stopped") and "12:03:05" in killed


def test_a_file_that_cannot_be_written_is_said_once_and_tried_again(
    tmp_path: Path, writing: Callable[..., StateFile], caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "missing"
    file = writing(folder / "vllm.prom")
    until(lambda: said(caplog), "it is said")
    time.sleep(0.1)
    (line,) = said(caplog)
    assert str(file.path) in line and "No such file" in line
    folder.mkdir()
    until(file.path.exists, "it is written where there is a folder")
    assert len(said(caplog)) == 1


def test_a_file_system_that_hangs_holds_up_neither_calls_nor_the_end(
    tmp_path: Path, writing: Callable[..., StateFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, answers = threading.Event(), threading.Event()
    real = os.replace

    def replace(source: Any, target: Any) -> None:
        reached.set()
        answers.wait()
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(state_file, "CLOSE_TIMEOUT", 0.05)
    plan, bound = planned()
    file = writing(tmp_path / "vllm.prom", plan=plan)
    try:
        assert reached.wait(60)
        bound(X)
        file.close()
    finally:
        answers.set()
    until(lambda: not list(tmp_path.iterdir()), "what was late is taken away, too")
