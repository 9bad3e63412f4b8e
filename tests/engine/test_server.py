"""A real server with the plugins, and the openai client."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator

import pytest
from engines import Model
from servers import END_LIMIT, Server, serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "stderr.log"
    options = ("--served-model-name", "tiny", "--skip-tokenizer-init", "--enforce-eager")
    variables = {"VLLM_FL_DISPATCH_DEBUG": "1", "VLLM_FL_PER_OP": "rms_norm=vendor|reference"}
    variables["VLLM_FL_METRICS"] = str(log.with_name("chat.prom"))
    with serving(model("qwen3"), log, *options, **variables) as started:
        yield started


def test_vllms_own_metrics_have_the_plan_and_its_counters(server: Server) -> None:
    server.client.completions.create(model="tiny", prompt=[9, 10, 11], max_tokens=8)
    with urllib.request.urlopen(f"{server.url}/metrics") as response:
        lines = response.read().decode().splitlines()
    (norm,) = [n for n in lines if n.startswith("vllm_fl_plan_info{") and 'op="rms_norm"' in n]
    assert 'engine="chat"' in norm and 'impl="vendor.cpu"' in norm
    calls = [n for n in lines if n.startswith("vllm_fl_calls_total{") and 'op="rms_norm"' in n]
    assert {n.split()[0] for n in calls} and any(line.startswith("vllm:") for line in lines)


def test_plan_counts_and_report_are_left_after_shutdown(server: Server) -> None:
    """Ends the server."""
    server.process.terminate()
    server.process.wait(timeout=END_LIMIT)
    log = server.log.read_text()
    plan = [line for line in log.splitlines() if " planned: " in line]
    assert len(plan) == 1 and "rms_norm=vendor.cpu" in plan[0] and "[vllm_fl." in plan[0]
    assert "fallbacks none, calls {" in log and "'vendor.cpu':" in log
    left = json.loads(server.log.with_name("chat.report.json").read_text())
    assert (left["state"], left["error"]) == ("ended", None)
    assert left["report"]["calls"]["rms_norm"]["vendor.cpu"] > 0
    assert not server.log.with_name("chat.rank0.prom").exists(), "what does not serve is not shown"
