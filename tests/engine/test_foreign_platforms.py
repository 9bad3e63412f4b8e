"""Next to a vendor's platform plugin: nothing changes until a policy selects it, reversibly. The
plugins are distributions of tests/plugins, which count calls. `alone` excludes vllm-fl through
VLLM_PLUGINS, so nothing of it is loaded."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_run import BIND, STOCK, Job
from engines import IN_ONE_PROCESS, PLUGINS, Model, Once, Result, batches

import envs

pytestmark = pytest.mark.slow

ALONE = {**STOCK, "VLLM_PLUGINS": "acme,acme_patches"}
"""With these variables vLLM loads nothing of vllm-fl."""

LAYERS = {
    *("RMSNorm", "SiluAndMul", "RotaryEmbedding"),
    *("RowParallelLinear", "VocabParallelEmbedding"),
}
"""Layers that the vendor's plugin registers."""

SILU = {"VLLM_FL_PER_OP": "silu_and_mul=reference|foreign"}

ROWS = """\
silu_and_mul: {"<=8": [reference, foreign], rest: [foreign, stock]}
rms_norm: {"<=8": [foreign, stock], rest: [reference, foreign]}
"""

Start = Callable[..., Result]


@pytest.fixture(scope="session")
def start(model: Model, once: Once, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """`start(how, eager=True, ranks=1, **variables)`: an engine on the vendor's platform. Its
    batches run twice; `served` counts each vendor layer's calls per rank in the second run."""
    folder = tmp_path_factory.mktemp("acme")
    with zipfile.ZipFile(envs.wheel(envs.PLUGINS / "fl-platform-acme")) as wheel:
        wheel.extractall(folder)
    path = os.pathsep.join((str(folder), str(PLUGINS)))
    updates = [["calls", {}, True], ["calls", {}, False]]

    def begin(how: str, *, eager: bool = True, ranks: int = 1, **variables: str) -> Result:
        options: dict[str, Any] = {"dtype": "float32", "max_model_len": 512}
        if ranks > 1:
            options["tensor_parallel_size"] = ranks
            variables = {BIND: "0|1", **variables}
        job = Job(str(model("qwen3")), batches(), eager=eager, options=options, updates=updates)
        name = f"acme-{how}-{'eager' if eager else 'compiled'}-{ranks}"
        debug = {"VLLM_FL_DISPATCH_DEBUG": "1", "PYTHONPATH": path}
        result = once(name, job, timeout=400, **debug, **variables)
        first, second = (update["answers"] for update in result["updates"])
        served = [
            {name: calls[name] - before.get(name, 0) for name in calls}
            for before, calls in zip(first, second, strict=True)
        ]
        return {**result, "served": served}

    return begin


@pytest.fixture(scope="session")
def acme(start: Start) -> Callable[..., Result]:
    """`acme(how, **variables)`: the eager one-process engines shared by the short tests."""
    return lambda how, **variables: start(how, **IN_ONE_PROCESS, **variables)


def assert_untouched(alone: Result, beside: Result) -> None:
    """Equal tokens, logits and calls, and a plan with only the vendor's and vLLM's code."""
    assert beside["tokens"] == alone["tokens"] and beside["logits"] == alone["logits"]
    assert beside["steps"] == alone["steps"]
    assert beside["served"] == alone["served"]
    for report in beside["report"]:
        impls = {entry["impl"] for entry in report["ops"].values()}
        assert all(impl.startswith(("foreign", "stock")) for impl in impls), report["ops"]
        assert report["demotions"] == report["fallbacks"] == {}


def assert_taken(alone: Result, taken: Result, *names: str) -> None:
    """The vendor's code computes the same tokens with as many calls, except for these names."""
    (served,), (stock,) = taken["served"], alone["served"]
    for name in names:
        assert served.pop(name, 0) == 0 and stock.pop(name) > 0
    assert served == stock
    assert taken["tokens"] == alone["tokens"]


def test_both_installed_nothing_changes(acme: Callable[..., Result]) -> None:
    alone, beside = acme("alone", **ALONE), acme("beside")
    assert_untouched(alone, beside)
    (served,) = beside["served"]
    assert served.keys() >= LAYERS | {"attention"} and all(served[n] for n in served)
    assert beside["report"][0]["mode"] == "eager"


def test_one_op_is_taken_by_policy_and_the_others_stay(acme: Callable[..., Result]) -> None:
    taken = acme("silu", **SILU)
    assert_taken(acme("alone", **ALONE), taken, "SiluAndMul")
    (report,) = taken["report"]
    assert report["ops"]["silu_and_mul"]["impl"] == "reference.torch"
    assert report["calls"]["silu_and_mul"]["reference.torch"] >= 2 * taken["steps"]  # layers


def test_one_setting_goes_back(acme: Callable[..., Result]) -> None:
    alone, back = acme("alone", **ALONE), acme("back", **SILU, **STOCK)
    assert_taken(alone, back)
    assert back["logits"] == alone["logits"]


def test_all_ops_are_taken_and_one_is_left_to_the_vendor(acme: Callable[..., Result]) -> None:
    reached = ("rms_norm", "silu_and_mul", "rotary_embedding")
    everything = ";".join(f"{op}=reference|foreign" for op in reached)
    layers = ("RMSNorm", "SiluAndMul", "RotaryEmbedding")  # no op describes the rest
    assert_taken(acme("alone", **ALONE), acme("all", VLLM_FL_PER_OP=everything), *layers)

    order = everything.replace("rms_norm=reference|foreign", "rms_norm=foreign|reference")
    left = acme("left", VLLM_FL_PER_OP=order)
    assert_taken(acme("alone", **ALONE), left, *layers[1:])
    assert left["report"][0]["ops"]["rms_norm"]["impl"] == "foreign"


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
@pytest.mark.parametrize(("ranks", "how"), [(1, "spawned"), (2, "spawned"), (2, "forked")])
def test_processes_ranks_and_compilers_change_nothing_either(
    eager: bool, ranks: int, how: str, start: Start
) -> None:
    method = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"} if how == "forked" else {}
    alone = start(f"alone-{how}", eager=eager, ranks=ranks, **method, **ALONE)
    beside = start(f"beside-{how}", eager=eager, ranks=ranks, **method)
    assert_untouched(alone, beside)
    seen = LAYERS | {"attention"} | ({"all_reduce"} if ranks > 1 else set())
    for served in beside["served"]:
        assert {name for name in served if served[name]} >= seen
    assert len(beside["served"]) == ranks
    if not eager:  # its compiler caches nothing
        assert all(calls["graphs"] for calls in beside["updates"][0]["answers"])


def test_one_op_is_taken_in_compiled_code(start: Start) -> None:
    taken = start("silu", eager=False, **SILU)
    assert_taken(start("alone-spawned", eager=False, **ALONE), taken, "SiluAndMul")
    assert taken["report"][0]["ops"]["silu_and_mul"]["impl"] == "reference.torch"


def test_attention_of_ours_serves_in_the_vendors_worker(
    acme: Callable[..., Result], tmp_path: Path
) -> None:
    uses = tmp_path / "uses"
    ours = {"VLLM_FL_PLUGIN_MODULES": "counting_attention", "COUNTING_FILE": str(uses)}
    order = {"VLLM_FL_PER_OP": "attention_backend=vendor:counting|stock"}
    alone, left = acme("alone", **ALONE), acme("attention-left", **ours)
    assert_untouched(alone, left)
    assert not uses.exists()
    taken = acme("attention", **ours, **order)
    assert_taken(alone, taken, "attention")
    assert uses.stat().st_size > 0 and taken["logits"] == alone["logits"]
    assert taken["report"][0]["ops"]["attention_backend"]["impl"] == "vendor.counting"


def test_orders_by_size_serve_beside_the_vendors_pass_manager(start: Start, tmp_path: Path) -> None:
    """The op is an operator that selects the row, and the vendor's pass manager stays in place."""
    config = tmp_path / "fl.yaml"
    config.write_text(ROWS)
    alone = start("alone-spawned", eager=False, **ALONE)
    ours = start("rows", eager=False, VLLM_FL_OP_CONFIG=str(config))
    (report,) = ours["report"]
    assert report["ops"]["silu_and_mul"]["rows"][0]["impl"] == "reference.torch"
    assert all(calls["graphs"] for calls in ours["updates"][0]["answers"])
    assert ours["tokens"] == alone["tokens"]
    assert report["fallbacks"] == report["demotions"] == {}
