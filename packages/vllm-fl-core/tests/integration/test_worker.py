"""A worker's startup without an engine: what it reads, writes and logs."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from children import run_each

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

HEAD = """
import gc, json, os, pickle, sys, time
sys.path.insert(0, os.environ["CONFIGS"])
import torch
from configs import engine_config
from vllm_fl.integration.entry import general_plugin
general_plugin()
from vllm.config.kernel import IrOpPriorityConfig
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.platforms import current_platform
from vllm_fl.dispatch import reset_default_manager, reset_global_policy
from vllm_fl_tools.operate import state_file
from vllm_fl.errors import PolicySealedError
from vllm_fl.integration.carried import Carried
from vllm_fl.integration.worker import PlannedWorker
from vllm_fl.settings.loading import load_settings

current_platform.get_default_ir_op_priority = lambda config: IrOpPriorityConfig()


class Worker:
    def __init__(self, vllm_config):
        self.vllm_config, self.device, self.rank = vllm_config, torch.device("cpu"), 0

    def init_device(self):
        pass

    def load_model(self, **options):
        return "loaded"

    def get_model(self):
        return torch.nn.Module()

    def compile_or_warm_up_model(self):
        return "warm"

    def shutdown(self):
        pass


class Failing(Worker):
    def load_model(self, **options):
        raise MemoryError


class TheirNorm(GemmaRMSNorm):
    pass


def kept(suffix, *states):
    # At once: closing it waits only a limited time.
    while True:
        with open(os.environ["REPORT"] + suffix + ".json") as file:
            left = json.load(file)
        if left["state"] in (states or ("ended", "failed")):
            return left
        time.sleep(0.01)


def planned(cls):
    return type("Planned", (PlannedWorker, cls), {})(config)


asked = {"VLLM_FL_PLUGINS": "vllm-fl-ops", "VLLM_FL_PREFLIGHT": "off"}
"""

START = """
for name in ("METRICS", "SHADOW"):
    if name in os.environ:
        asked["VLLM_FL_" + name] = os.environ[name]
if "FOREIGN" in os.environ:
    GemmaRMSNorm.register_oot(TheirNorm)
config = engine_config(pickle.loads(pickle.dumps(Carried(load_settings(asked, platform="cpu")))))
config.kernel_config.ir_op_priority = IrOpPriorityConfig()
try:
    failing = planned(Failing)
    failing.init_device()
    failing.load_model(load_dummy_weights=True)
except MemoryError:
    failed = kept("") if "REPORT" in os.environ else None
    reset_global_policy()  # which is open, as the configuration is
assert "plan" not in config.additional_config["vllm_fl"]
if "METRICS" in os.environ:
    config.parallel_config.data_parallel_index = 2
    state_file.INTERVAL = 3600.0
worker = planned(Worker)
worker.init_device()
assert worker.load_model(load_dummy_weights=True) == "loaded"
output = {
    "failed": failed,
    "report": worker.vllm_fl_report(),
    "entry": config.additional_config["vllm_fl"],
    "reset": [],
}
if "METRICS" in os.environ:
    found = (t for t in gc.get_objects() if isinstance(t, state_file.StateFile))
    (file,) = (t for t in found if not t._is_closed and t.path.suffix == ".prom")
    while not file.path.exists():
        assert file._thread.is_alive()
        time.sleep(0.01)
    output["metrics"] = file.path.read_text()
    assert worker.compile_or_warm_up_model() == "warm"
    output["served"] = kept(".dp2.rank0", "serving")
for _ in range(2):
    try:
        reset_default_manager()
        output["reset"].append("done")
    except PolicySealedError:
        output["reset"].append("sealed")
    worker.shutdown()
if "METRICS" in os.environ:
    file._thread.join()
    output["left"] = [name for name in os.listdir(file.path.parent) if name.endswith(".prom")]
    output["kept"] = kept(".dp2.rank0")
print(json.dumps(output))
"""


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Case -> a worker's results of its startup; "metered" includes all metrics and files."""
    metrics = tmp_path_factory.mktemp("m") / "chat.prom"
    report = metrics.with_suffix(".report")
    metered = {"METRICS": str(metrics), "REPORT": str(report), "SHADOW": "0.01"}
    cases = {"plain": {}, "metered": metered, "foreign": {"FOREIGN": "1"}}
    here = {"CONFIGS": str(Path(__file__).parents[1]), "VLLM_PLUGINS": "fl"}
    here["VLLM_FL_PLUGINS"] = "vllm-fl-ops"  # as in the engine's settings
    bodies = {name: (START, variables) for name, variables in cases.items()}
    outputs = run_each(HEAD, bodies, {**os.environ, **here})
    return {name: json.loads(text.splitlines()[-1]) for name, text in outputs.items()}


def test_a_start_seals_its_plan(starts: Any) -> None:
    output = starts["plain"]
    assert output["entry"] == {"plan": output["report"]["digest"]}
    assert output["reset"] == ["sealed", "done"], "the seal ends with the engine"


def test_what_watches_changes_neither_plan_nor_digest(starts: Any) -> None:
    metered = starts["metered"]
    watched, plain = dict(metered["report"]), dict(starts["plain"]["report"])
    assert watched.pop("start").keys() == plain.pop("start").keys()
    assert watched == plain and plain["ops"]
    assert metered["entry"] == starts["plain"]["entry"], (
        "that is what vLLM's compile-cache key has of us"
    )


def test_a_worker_writes_its_counters_while_it_serves(starts: Any) -> None:
    output = starts["metered"]
    lines = output["metrics"].splitlines()
    plan = [line for line in lines if line.startswith("vllm_fl_plan_info{")]
    assert len(plan) == len(output["report"]["ops"])
    labels = ('dp="2"', 'engine="chat"', 'rank="0"')
    assert all(label in line for line in plan for label in labels)
    assert all(output["report"]["digest"] in line for line in plan)
    assert output["report"]["device"] is None, "no order depends on it"
    assert output["left"] == [], "it ends with the worker"
    assert output["served"]["state"] == "serving", "at once: it is written every hour in this test"


def test_a_worker_leaves_its_report_and_what_it_failed_of(starts: Any) -> None:
    metered = starts["metered"]
    kept = metered["kept"]
    expected = {**metered["report"], "start": kept["report"]["start"]}  # its seconds increase
    assert kept["report"] == expected
    assert (kept["schema"], kept["state"], kept["error"]) == (1, "ended", None)
    assert (kept["rank"], kept["replica"]) == (0, 2)
    assert {"vllm", "torch", "vllm-fl-core"} <= {*kept["versions"]}
    assert "vllm-fl-ops" in kept["plugins"]
    assert "preflight=off (environment VLLM_FL_PREFLIGHT)" in kept["settings"]
    assert not any("op_backends" in line for line in kept["settings"]), "plugins' are in the plan"
    failed = metered["failed"]
    assert failed["state"] == "failed" and failed["report"]["ops"]
    assert (failed["error"]["method"], failed["error"]["why"]) == ("load_model", "MemoryError")


def test_a_layer_of_another_plugins_is_in_the_plan_and_the_digest(starts: Any) -> None:
    theirs, plain = starts["foreign"]["report"], starts["plain"]["report"]
    theirs_ops, plain_ops = dict(theirs["ops"]), dict(plain["ops"])
    assert theirs_ops.pop("rms_norm")["impl"] == "foreign"
    assert plain_ops.pop("rms_norm")["impl"] == "stock"
    assert theirs_ops == plain_ops
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
