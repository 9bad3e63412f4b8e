"""The engine check, with a fake vLLM: started, reported and remaining engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

PLUGIN = """
from vllm_fl import BackendImplKind, OpImpl

def silu_and_mul(x):
    import torch
    d = x.shape[-1] // 2
    return torch.nn.functional.silu(x[..., :d]) * x[..., d:]

def gelu_and_mul(x, approximate="none"):
    import torch
    d = x.shape[-1] // 2
    return torch.nn.functional.gelu(x[..., :d], approximate=approximate) * x[..., d:]

def register(registry):
    for fn in (silu_and_mul, gelu_and_mul):
        registry.register_impl(
            OpImpl(fn.__name__, "vendor.toy", BackendImplKind.VENDOR, fn, "toy", traceable=True)
        )
"""
TEST = """
from vllm_fl_tools.testing import OpConformance

class TestToy(OpConformance):
    backend = "vendor.toy"
    deadline = {deadline}
"""
VLLM = """
import os, subprocess, sys
from pathlib import Path

from types import SimpleNamespace as Some

STARTS = Path(__file__).with_name("starts.txt")

class SamplingParams:
    def __init__(self, **_):
        pass

class LLM:
    def __init__(self, *_, **__):
        orders = os.environ["VLLM_FL_PER_OP"].split(";")
        self.ops = {order.partition("=")[0]: "vendor.toy" for order in orders}
        core = subprocess.Popen(["sleep", "600"], process_group=0)  # as an engine's own processes
        with STARTS.open("a") as out:
            print(*self.ops, core.pid, file=out)
        print("line one of the log", "a 'quoted' line", sep="\\n", flush=True)
        if SICK(self.ops):
            MISHAP
        core.kill()
        sizes = Some(get_vocab_size=lambda: 512, max_model_len=256)
        graphs = Some(compilation_config=Some(cudagraph_capture_sizes=None))
        self.llm_engine = Some(step=None, model_config=sizes, vllm_config=graphs)

    def generate(self, *_, **__):
        return [Some(outputs=[Some(token_ids=[1] * 8)])]

    def collective_rpc(self, name):
        return [{"ops": {op: PLANNED for op in self.ops}}]
"""
OURS = '{"impl": "vendor.toy", "reason": ""}'
Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(
        sick: str = "False",
        mishap: str = "raise RuntimeError('no kernel image')",
        planned: str = OURS,
        deadline: float = 60.0,
    ) -> pytest.RunResult:
        vllm = VLLM.replace("SICK(self.ops)", sick.replace("ops", "self.ops"))
        vllm = vllm.replace("MISHAP", mishap).replace("PLANNED", planned)
        pytester.makepyfile(toy_plugin=PLUGIN, test_toy=TEST.format(deadline=deadline), vllm=vllm)
        monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "toy_plugin")
        monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=":")
        return pytester.runpytest_subprocess("-q", "-m", "engine", "-p", "no:cacheprovider")

    return run


def starts(folder: Path) -> list[str]:
    """The ops of each engine that was started."""
    return [line.rpartition(" ")[0] for line in (folder / "starts.txt").read_text().splitlines()]


def left_behind(folder: Path) -> list[str]:
    """The engine processes that still live."""
    pids = [line.rpartition(" ")[2] for line in (folder / "starts.txt").read_text().splitlines()]
    return [pid for pid in pids if lives(pid)]


def lives(pid: str) -> bool:
    try:
        return " Z " not in Path("/proc", pid, "stat").read_text()
    except OSError:
        return False


def test_an_op_that_is_not_planned_is_named_by_the_one_engine(
    run: Run, pytester: pytest.Pytester
) -> None:
    other = '{"impl": "stock.vllm", "reason": "it is wrong"}'
    result = run(planned=f"{OURS} if op == 'gelu_and_mul' else {other}")
    outcomes = result.parseoutcomes()
    assert (outcomes["passed"], outcomes["failed"]) == (1, 1)
    result.stdout.fnmatch_lines(["*the engine runs stock.vllm: it is wrong*"])
    result.stdout.fnmatch_lines(["FAILED *test_engine*silu_and_mul*"])
    assert starts(pytester.path) == ["gelu_and_mul silu_and_mul"]


def test_where_the_engine_fails_its_log_is_shown(run: Run, pytester: pytest.Pytester) -> None:
    result = run(sick="'silu_and_mul' in ops")
    assert result.parseoutcomes()["failed"] == 2
    result.stdout.fnmatch_lines(["*the engine failed; *bisect --startup*"])
    result.stdout.fnmatch_lines(["*line one of the log", "*a 'quoted' line", "*no kernel image*"])
    assert starts(pytester.path) == ["gelu_and_mul silu_and_mul"]
    assert left_behind(pytester.path) == []


@pytest.mark.slow
def test_a_deadline_is_said_and_leaves_no_process(
    run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(pytester.path))
    noted = "with noting('the import of toy'): time.sleep(600)"
    mishap = f"import time; from vllm_fl.plugins.breadcrumb import noting\n            {noted}"
    result = run(sick="'silu_and_mul' in ops", mishap=mishap, deadline=2.0)
    assert result.parseoutcomes()["failed"] == 2
    result.stdout.fnmatch_lines(["*did not answer within 4 s*`deadline`*test class*"])
    result.stdout.fnmatch_lines(["*line one of the log", "*a 'quoted' line"])
    assert left_behind(pytester.path) == []
    assert list((pytester.path / "vllm-fl" / "running").iterdir()) == [], "no note of what it ran"
