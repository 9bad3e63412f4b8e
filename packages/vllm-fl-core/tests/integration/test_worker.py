"""The worker's start without an engine: what it reads, and what its preflight answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import OrderedDict
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import managing, planning, silu

from vllm_fl.contracts import ModelSizes
from vllm_fl.engine.facts import EngineFacts
from vllm_fl.engine.preflight import Findings
from vllm_fl.engine.warmup import warm_counts
from vllm_fl.plugins.registry import Owner
from vllm_fl.settings.loading import load_settings

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

START = """
import json, os, pickle, sys
sys.path.insert(0, os.environ["CONFIGS"])
import torch
from configs import engine_config
from vllm_fl.integration.entry import general_plugin
general_plugin()
from vllm.config.kernel import IrOpPriorityConfig
from vllm.platforms import current_platform
from vllm_fl.integration.planning import Carried
from vllm_fl.integration.worker import PlannedWorker
from vllm_fl.settings.loading import Settings, load_settings

decoded = []
plain = Settings.from_json.__func__

def counting(cls, data):
    decoded.append(1)
    return plain(cls, data)

Settings.from_json = classmethod(counting)
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

    def shutdown(self):
        pass


asked = {"VLLM_FL_PREFLIGHT": "off", "VLLM_FL_METRICS": os.environ.get("METRICS", "")}
asked |= {"VLLM_FL_SHADOW": os.environ["SHADOW"]} if "SHADOW" in os.environ else {}
settings = load_settings(asked, platform="cpu")
carried = pickle.loads(pickle.dumps(Carried(settings=settings.to_json())))
config = engine_config(carried)
config.kernel_config.ir_op_priority = IrOpPriorityConfig()
worker = type("Planned", (PlannedWorker, Worker), {})(config)
assert worker.load_model(load_dummy_weights=True) == "loaded"
told = {
    "decoded": len(decoded),
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
    "IrOpPriorityConfig()\nworker = ",
    "IrOpPriorityConfig()\nconfig.parallel_config.data_parallel_index = 2\nworker = ",
).replace(
    "\nfor _ in range(2):",
    """
import time
file = worker.vllm_fl_metrics
while not file.path.exists():
    assert file._thread.is_alive()
    time.sleep(0.01)
told["metrics"] = file.path.read_text()

for _ in range(2):""",
)
METERED = METERED.replace(
    "print(", 'file._thread.join()\ntold["left"] = os.listdir(file.path.parent)\nprint('
)


@cache
def start(code: str = START, **variables: str) -> Any:
    """What a worker's start in a process of its own prints."""
    here = {"CONFIGS": str(Path(__file__).parents[1]), "VLLM_PLUGINS": "fl"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **here, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_start_decodes_its_settings_once() -> None:
    told = start()
    assert told["decoded"] == 1
    assert told["entry"] == {"plan": told["report"]["digest"]}
    assert told["reset"] == ["sealed", "done"], "the seal ends with the engine"


@pytest.fixture(scope="module")
def metered(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A worker with everything that is seen and written while it serves."""
    return start(METERED, METRICS=str(tmp_path_factory.mktemp("m") / "chat.prom"), SHADOW="0.01")


def test_what_watches_changes_neither_plan_nor_digest(metered: Any) -> None:
    watched, plain = metered["report"], start()["report"]
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


def worker_of(**fields: Any) -> Any:
    """What a preflight asks of its worker."""
    settings = load_settings({"VLLM_FL_PREFLIGHT": "run", **fields.pop("env", {})})
    facts = EngineFacts(settings, "eager", **{"dtype": torch.bfloat16, **fields})
    return SimpleNamespace(
        vllm_fl_facts=facts, vllm_fl_groups=None, rank=1, device=torch.device("cpu")
    )


@pytest.mark.parametrize("error", [SystemExit(3), RuntimeError("boom")], ids=repr)
@pytest.mark.parametrize("where", ["attention", "ops"])
def test_whatever_a_plugin_raises_is_this_ranks_verdict(
    error: BaseException, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks wait for it, minutes, if it never comes."""
    from vllm_fl.integration import worker

    def fails(*_: Any, **__: Any) -> Any:
        raise error

    if where == "attention":
        monkeypatch.setattr(worker.attention, "faults", fails)
    else:
        monkeypatch.setattr(worker, "find_faults", fails)
    preflight = worker._Preflight(worker_of())
    verdict = preflight.verdict(planning(managing(silu("vendor.acme"))), {"mode": "eager"})
    assert verdict.rank == 1 and type(error).__name__ in verdict.failure
    assert verdict.facts == {"mode": "eager"}


def test_what_is_right_and_not_batch_invariant_is_rejected_and_not_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Measured is what has no fault, as it will serve, and only where somebody asks for it."""
    from vllm_fl.integration import worker

    measured: list[list[str]] = []

    def faults(*_: Any, **__: Any) -> Any:
        return Findings({("silu_and_mul", "vendor.wrong"): ("it is wrong", None)})

    def variant(impls: Any, *_: Any, **__: Any) -> Any:
        measured.append([impl.impl_id for impl in impls])
        return {("silu_and_mul", i): "not batch-invariant: 1 row" for i in measured[-1][:1]}

    monkeypatch.setattr(worker, "find_faults", faults)
    monkeypatch.setattr(worker, "find_variant", variant)
    plan = planning(managing(silu("vendor.wrong"), silu("vendor.acme"), silu("vendor.emca")))
    env = {"VLLM_FL_REQUIRE": "batch_invariant", "VLLM_FL_PREFLIGHT": "verify"}
    verdict = worker._Preflight(worker_of(env=env)).verdict(plan, {})
    assert set(verdict.faults) == {("silu_and_mul", "vendor.wrong")}
    assert measured == [["vendor.acme", "vendor.emca"]]
    assert verdict.rejections == {
        ("silu_and_mul", "vendor.acme"): "VLLM_FL_REQUIRE=batch_invariant, and it is not "
        "batch-invariant: 1 row"
    }
    worker._Preflight(worker_of()).verdict(plan, {})
    assert measured[1:] == [[]]


def test_an_interrupt_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_fl.integration import worker

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "find_faults", interrupted)
    with pytest.raises(KeyboardInterrupt):
        worker._Preflight(worker_of()).verdict(planning(managing()), {})


def test_the_worker_that_vllm_chose_is_wrapped_once() -> None:
    from vllm_fl.integration import worker

    parallel = SimpleNamespace(worker_cls="collections.OrderedDict")
    for _ in range(2):
        worker.wrap_worker(SimpleNamespace(parallel_config=parallel))  # type: ignore[arg-type]
    module, _, name = parallel.worker_cls.rpartition(".")
    assert module == worker.__name__
    wrapped = getattr(worker, name)
    assert [c.__name__ for c in wrapped.__mro__[1:3]] == ["PlannedWorker", "OrderedDict"]
    for path in ("auto", OrderedDict):
        parallel.worker_cls = path  # type: ignore[assignment]
        worker.wrap_worker(SimpleNamespace(parallel_config=parallel))  # type: ignore[arg-type]
        assert parallel.worker_cls is path


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_what_any_row_may_call_is_verified_once(monkeypatch: pytest.MonkeyPatch, mode: Any) -> None:
    """And in compiled mode as compiled, what a row begins with."""
    from vllm_fl.integration import worker

    seen: list[tuple[list[str], set[str]]] = []

    def noting(impls: Any, *_: Any, compiled: Any, **__: Any) -> Any:
        seen.append(([impl.impl_id for impl in impls], {impl_id for _, impl_id in compiled}))
        return SimpleNamespace(
            remarks=[], faults={("silu_and_mul", "vendor.acme"): ("wrong", None)}
        )

    monkeypatch.setattr(worker, "find_faults", noting)
    impls = silu("vendor.acme"), silu("reference.torch"), silu("default.flagos")
    order = {"<=4": ["vendor", "reference"], "<=9": "stock", "rest": "flagos"}
    manager = managing(*impls, per_op_order={"silu_and_mul": order})
    preflight = worker._Preflight(worker_of())
    verdict = preflight.verdict(planning(manager, mode), {})
    assert verdict.failure == ""
    assert verdict.faults == {("silu_and_mul", "vendor.acme"): "wrong"}
    everyone = ["default.flagos", "vendor.acme", "reference.torch"]
    firsts = {"default.flagos", "vendor.acme"} if mode == "compiled" else set()
    assert seen == [(everyone, firsts)]
    # Taken out, it is out of its row, and what comes first there is verified as such.
    again = planning(manager, mode, demoted=verdict.faults)
    assert again.entries["silu_and_mul"].label == "reference.torch(<=4)|stock(<=9)|default.flagos"
    preflight.verdict(again, {})
    new = (["reference.torch"], {"reference.torch"}) if mode == "compiled" else ([], set())
    assert seen[1] == new


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

    def said(plan: Any) -> list[str]:
        caplog.clear()
        worker._say_what_is_taken_whole(plan)
        return [r.getMessage() for r in caplog.records if r.name == worker.log.name]

    assert said(planning(by_size, "eager")) == said(planning(same, "compiled")) == []
    (line,) = said(planning(by_size, "compiled"))
    assert "nothing fused into it: silu_and_mul." in line


def warmed(plan: Any, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> dict[str, list[int]]:
    """impl id -> the token counts at which a start would have it run."""
    from vllm_fl.integration import worker

    given: dict[Any, list[int]] = {}

    def finds(*_: Any, **options: Any) -> Findings:
        given.update(options["warm"])
        return Findings()

    monkeypatch.setattr(worker, "find_faults", finds)
    worker._Preflight(worker_of(sizes=ModelSizes(tokens=(1, 100)), **fields)).verdict(plan, {})
    return {impl_id: counts for (_, impl_id), counts in given.items()}


def test_what_serves_is_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = silu("vendor.acme", priority=9), silu("vendor.emca", priority=8)
    plan = planning(managing(first, second))
    counts = warmed(plan, monkeypatch, captured=(24, 48))
    assert counts == {"vendor.acme": warm_counts(100, sizes=(24, 48))}
    off = {"VLLM_FL_PREFLIGHT": "off"}
    assert warmed(plan, monkeypatch, env=off) == {}
    plain = silu("vendor.acme", priority=9, traceable=True)
    assert warmed(planning(managing(plain, second)), monkeypatch) == {}


def test_what_serves_some_sizes_is_warmed_up_at_those(monkeypatch: pytest.MonkeyPatch) -> None:
    order = {"<=40": "vendor:acme", "rest": "vendor:emca"}
    manager = managing(
        silu("vendor.acme"),
        silu("vendor.emca"),
        per_op_order={"silu_and_mul": order},  # type: ignore[dict-item]
    )
    counts = warmed(planning(manager), monkeypatch)
    assert set(counts) == {"vendor.acme", "vendor.emca"}
    few, many = counts["vendor.acme"], counts["vendor.emca"]
    assert {1, 2, 39, 40} <= set(few) and max(few) == 40
    assert min(many) > 40 and {56, 63, 64, 99, 100} <= set(many)


@pytest.mark.parametrize("order", ["vendor", {"<=4": "stock", "rest": "vendor"}])
def test_a_foreign_layer_is_named_with_what_does_not_run_in_it(
    order: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the op is left to its owner by a note, and so has no candidates of its own."""
    from vllm_fl.integration import worker

    manager = managing(silu("vendor.acme"), per_op_order={"silu_and_mul": order})
    plan = planning(manager, notes={"silu_and_mul": "layer SiluAndMul is theirs"})
    snapshot = SimpleNamespace(owners={("silu_and_mul", "vendor.acme"): Owner("acme", "acme", "1")})
    default = SimpleNamespace(registry=SimpleNamespace(snapshot=lambda: snapshot))
    monkeypatch.setattr(worker, "get_default_manager", lambda: default)
    monkeypatch.setattr(worker, "foreign_layers", lambda: {"SiluAndMul": "theirs.Silu of theirs 2"})
    layer = SimpleNamespace(op="silu_and_mul", cls="SiluAndMul")
    monkeypatch.setattr(worker, "layer_table", lambda: [layer])
    caplog.set_level("WARNING", logger="vllm_fl")
    worker._warn_of_foreign_layers(plan)
    messages = [record.getMessage() for record in caplog.records]
    (said,) = [message for message in messages if "is left to" in message]
    assert "SiluAndMul is left to theirs.Silu of theirs 2" in said
    assert "'vendor.acme' of acme 1 does not run" in said


def test_what_layers_call_is_captured_where_vllm_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler's code takes the place of what it traces."""
    from vllm_fl.integration import worker

    given: list[dict[Any, int]] = []

    def finds(*_: Any, captured: Any, **__: Any) -> Findings:
        given.append(captured)
        return Findings()

    monkeypatch.setattr(worker, "find_faults", finds)
    impls = silu("vendor.acme"), silu("reference.torch", traceable=True)
    orders: Any = {"silu_and_mul": {"<=4": "reference", "rest": "vendor"}}
    for device in ("cuda", "cpu"):
        for mode in ("eager", "compiled"):
            told = worker_of(sizes=ModelSizes(tokens=(1, 2048)), captured=(1, 64, 512))
            told.device = torch.device(device)
            plan = planning(managing(*impls, per_op_order=orders), mode)  # type: ignore[arg-type]
            worker._Preflight(told).verdict(plan, {})
    both = {("silu_and_mul", name): 64 for name in ("vendor.acme", "reference.torch")}
    assert given == [both, {("silu_and_mul", "vendor.acme"): 64}, {}, {}]


@pytest.mark.parametrize(
    ("how", "order", "counts"),
    [
        ("verify", ["vendor:acme"], {1, 17, 256}),
        (
            "verify",
            {"<=4": "vendor:acme", "<=900": "vendor:emca", "rest": "stock"},
            {1, 4, 17, 256},
        ),
        ("verify", ["stock"], set()),
        ("run", ["vendor:acme"], set()),
        ("off", ["vendor:acme"], set()),
    ],
)
def test_a_rank_asks_for_runs_of_the_loaded_model(
    how: str, order: Any, counts: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_fl.integration import worker

    monkeypatch.setattr(worker, "find_faults", lambda *_, **__: Findings())
    manager = managing(
        silu("vendor.acme"), silu("vendor.emca"), per_op_order={"silu_and_mul": order}
    )
    told = worker_of(sizes=ModelSizes(tokens=(1, 2048)), env={"VLLM_FL_PREFLIGHT": how})
    assert worker._Preflight(told).verdict(planning(manager), {}).counts == counts
    small = worker_of(sizes=ModelSizes(tokens=(1, 100)), env={"VLLM_FL_PREFLIGHT": how})
    found = worker._Preflight(small).verdict(planning(manager), {}).counts
    assert found == {min(n, 100) for n in counts}, "a model runs no more than its largest batch"
