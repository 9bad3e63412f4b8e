"""The worker's start without an engine: what it reads, writes and says."""

from __future__ import annotations

import json
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
from builders import managing, planning, silu

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

START = """
import json, os, pickle, sys, time
sys.path.insert(0, os.environ["CONFIGS"])
import torch
from configs import engine_config
from vllm_fl.integration.entry import general_plugin
general_plugin()
from vllm.config.kernel import IrOpPriorityConfig
from vllm.platforms import current_platform
from vllm_fl.dispatch import reset_global_policy
from vllm_fl.integration.planning import Carried
from vllm_fl.integration.worker import PlannedWorker
from vllm_fl.settings.loading import load_settings

current_platform.get_default_ir_op_priority = lambda config: IrOpPriorityConfig()
type(current_platform).vllm_fl_stock_priority = classmethod(
    lambda cls, config: IrOpPriorityConfig.with_default(["native"])
)


class Worker:
    def __init__(self, vllm_config):
        self.vllm_config, self.device, self.rank = vllm_config, torch.device("cpu"), 0

    def load_model(self, **options):
        return "loaded"

    def get_model(self):
        return torch.nn.Module()

    def compile_or_warm_up_model(self):
        return "warm"

    def shutdown(self):
        pass


def kept(whose, *states):
    # As soon as it is so: whoever closes it waits only so long.
    while True:
        with open(os.environ["REPORT"] + whose + ".json") as file:
            left = json.load(file)
        if left["state"] in (states or ("ended", "failed")):
            return left
        time.sleep(0.01)


asked = {"VLLM_FL_PLUGINS": "vllm-fl-ops", "VLLM_FL_PREFLIGHT": "off"}
asked |= {"VLLM_FL_METRICS": os.environ.get("METRICS", "")}
asked |= {"VLLM_FL_REPORT": os.environ["REPORT"] + ".json"} if "REPORT" in os.environ else {}
asked |= {"VLLM_FL_SHADOW": os.environ["SHADOW"]} if "SHADOW" in os.environ else {}
settings = load_settings(asked, platform="cpu")
carried = pickle.loads(pickle.dumps(Carried(settings)))
config = engine_config(carried)
config.kernel_config.ir_op_priority = IrOpPriorityConfig()


class Failing(Worker):
    def load_model(self, **options):
        raise MemoryError


try:
    type("PlannedFailing", (PlannedWorker, Failing), {})(config).load_model(load_dummy_weights=True)
except MemoryError:
    reset_global_policy()  # which is open, as the configuration is
assert "plan" not in config.additional_config["vllm_fl"]
worker = type("Planned", (PlannedWorker, Worker), {})(config)
assert worker.load_model(load_dummy_weights=True) == "loaded"
told = {
    "report": worker.vllm_fl_report(),
    "entry": config.additional_config["vllm_fl"],
    "reset": [],
}
from vllm_fl.dispatch import reset_default_manager
from vllm_fl.errors import PolicySealedError

for _ in range(2):
    try:
        reset_default_manager()
        told["reset"].append("done")
    except PolicySealedError:
        told["reset"].append("sealed")
    worker.shutdown()
print(json.dumps(told))
"""

METERED = START.replace(
    '["vllm_fl"]\nworker = ',
    '["vllm_fl"]\nconfig.parallel_config.data_parallel_index = 2\n'
    "from vllm_fl.engine.state_file import StateFile\n"
    'StateFile.__init__.__kwdefaults__["every"] = 3600.0\nworker = ',
).replace(
    "\nfor _ in range(2):",
    """
file = worker.vllm_fl_serving.metrics
while not file.path.exists():
    assert file._thread.is_alive()
    time.sleep(0.01)
told["metrics"] = file.path.read_text()
assert worker.compile_or_warm_up_model() == "warm"
told["served"] = kept(".dp2.rank0", "serving")

for _ in range(2):""",
)
METERED = METERED.replace(
    "print(",
    'file._thread.join()\ntold["left"] = os.listdir(file.path.parent)\n'
    'told["kept"] = kept(".dp2.rank0")\nprint(',
)


@cache
def start(code: str = START, **variables: str) -> Any:
    """What a worker's start in a process of its own prints."""
    here = {"CONFIGS": str(Path(__file__).parents[1]), "VLLM_PLUGINS": "fl"}
    here["VLLM_FL_PLUGINS"] = "vllm-fl-ops"  # as the engine's settings say
    done = forked.run(code, env={**os.environ, **here, **variables})
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_start_seals_its_plan() -> None:
    told = start()
    assert told["entry"] == {"plan": told["report"]["digest"]}
    assert told["reset"] == ["sealed", "done"], "the seal ends with the engine"


@pytest.fixture(scope="module")
def metered(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A worker with everything that is seen and written while it serves."""
    metrics = tmp_path_factory.mktemp("m") / "chat.prom"
    report = tmp_path_factory.mktemp("r") / "chat"
    return start(METERED, METRICS=str(metrics), REPORT=str(report), SHADOW="0.01")


def test_what_watches_changes_neither_plan_nor_digest(metered: Any) -> None:
    watched, plain = dict(metered["report"]), start()["report"]
    assert watched.pop("start").keys() == plain.pop("start").keys()
    assert watched == plain and plain["ops"]
    assert metered["entry"] == start()["entry"], "that is what vLLM's compile-cache key has of us"


def test_a_worker_writes_its_counters_while_it_serves(metered: Any) -> None:
    told = metered
    lines = told["metrics"].splitlines()
    plan = [line for line in lines if line.startswith("vllm_fl_plan_info{")]
    assert len(plan) == len(told["report"]["ops"])
    assert all('engine="chat",dp="2",rank="0"' in line for line in plan)
    assert all(told["report"]["digest"] in line for line in plan)
    assert told["left"] == [], "it ends with the worker"


def test_a_worker_leaves_its_report(metered: Any) -> None:
    kept = metered["kept"]
    told = {**metered["report"], "start": kept["report"]["start"]}  # its seconds go on
    assert kept["report"] == told
    assert (kept["schema"], kept["state"], kept["error"]) == (1, "ended", None)
    assert (kept["rank"], kept["replica"]) == (0, 2)
    assert {"vllm", "torch", "vllm-fl-core"} <= {*kept["versions"]}
    assert "vllm-fl-ops" in kept["plugins"]
    assert "preflight=off (environment VLLM_FL_PREFLIGHT)" in kept["settings"]
    assert not any("op_backends" in line for line in kept["settings"]), "plugins' are in the plan"


def test_a_report_says_that_it_serves_as_soon_as_the_start_has_ended(metered: Any) -> None:
    assert metered["served"]["state"] == "serving", "it is written every hour in this test"


LEFT = START.replace(
    "reset_global_policy()  # which",
    """
    told_of_failing = kept("")
    reset_global_policy()  # which""",
).replace("print(json.dumps(told))", "print(json.dumps(told_of_failing))")


def test_a_start_that_fails_leaves_what_it_failed_of(tmp_path: Path) -> None:
    kept = start(LEFT, REPORT=str(tmp_path / "chat"))
    assert kept["state"] == "failed" and kept["report"]["ops"]
    assert kept["error"]["method"] == "load_model" and kept["error"]["why"] == "MemoryError"


FOREIGN = """
import sys
from vllm.model_executor.layers.layernorm import GemmaRMSNorm

class TheirNorm(GemmaRMSNorm):
    pass

GemmaRMSNorm.register_oot(TheirNorm)
"""


def test_a_layer_of_another_plugins_is_in_the_plan_and_the_digest() -> None:
    first, rest = START.split("\nfrom vllm_fl.dispatch import reset_global", 1)
    theirs = start(f"{first}{FOREIGN}\nfrom vllm_fl.dispatch import reset_global{rest}")["report"]
    plain = start()["report"]
    assert theirs["ops"].pop("rms_norm")["impl"] == "foreign"
    assert plain["ops"].pop("rms_norm")["impl"] == "stock"
    assert theirs["ops"] == plain["ops"]
    assert theirs["digest"] != plain["digest"]


def test_the_worker_that_vllm_chose_is_wrapped_once() -> None:
    from vllm.v1.worker.worker_base import WorkerBase

    from vllm_fl.integration import worker

    parallel = SimpleNamespace(worker_cls="vllm.v1.worker.worker_base.WorkerBase")
    for _ in range(2):
        worker.wrap_worker(SimpleNamespace(parallel_config=parallel))  # type: ignore[arg-type]
    module, _, name = parallel.worker_cls.rpartition(".")
    assert module == worker.__name__
    wrapped = getattr(worker, name)
    assert [c.__name__ for c in wrapped.__mro__[1:3]] == ["PlannedWorker", "WorkerBase"]
    for path in ("auto", WorkerBase):
        parallel.worker_cls = path  # type: ignore[assignment]
        worker.wrap_worker(SimpleNamespace(parallel_config=parallel))  # type: ignore[arg-type]
        assert parallel.worker_cls is path


def test_the_log_names_what_a_compiler_takes_whole_since_it_is_ordered_by_size(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from vllm_fl.integration import worker

    caplog.set_level("INFO", logger="vllm_fl")
    orders = [{"<=4": "vendor", "rest": "reference"}, {"<=4": "vendor", "rest": "vendor"}]
    by_size, same = (
        managing(
            silu("vendor.acme", traceable=True),
            silu("reference.torch", traceable=True),
            per_op_order={"silu_and_mul": order},
        )
        for order in orders
    )

    def said(plan: Any, inlined: Any = ()) -> list[str]:
        caplog.clear()
        worker._say_what_is_taken_whole(plan, inlined)
        return [r.getMessage() for r in caplog.records if r.name == worker.log.name]

    assert said(planning(by_size, "eager")) == said(planning(same, "compiled")) == []
    (line,) = said(planning(by_size, "compiled"))
    assert "nothing fused into it: silu_and_mul." in line
    assert said(planning(by_size, "compiled"), {"silu_and_mul"}) == []
