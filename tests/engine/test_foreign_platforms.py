"""Beside a vendor's platform plugin: nothing changes until a policy says so, and it goes back.

The plugins are distributions of tests/plugins, which count who is called. `alone` leaves vllm-fl
out by vLLM's own variable, so that nothing of it is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import vendors
from engine_run import STOCK
from engines import IN_ONE_PROCESS, PLUGINS, Once, Result
from vendors import ALONE, LAYERS, assert_untouched

FORKED = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
SILU = {"VLLM_FL_PER_OP": "silu_and_mul=reference|foreign"}

ROWS = """\
silu_and_mul: {"<=8": [reference, foreign], rest: [foreign, stock]}
rms_norm: {"<=8": [foreign, stock], rest: [reference, foreign]}
"""

Start = Callable[..., Result]


@pytest.fixture(scope="session")
def start(
    model: Callable[[str], Path], once: Once, tmp_path_factory: pytest.TempPathFactory
) -> Start:
    """`start(plugin, how, eager=True, ranks=1, **variables)`: `vendors.start` on a tiny model."""
    installed = cache(lambda plugin: vendors.installed(plugin, tmp_path_factory.mktemp(plugin)))

    def begin(plugin: str, how: str, **more: Any) -> Result:
        path = os.pathsep.join((installed(plugin), str(PLUGINS)))
        return vendors.start(once, plugin, how, model("qwen3"), PYTHONPATH=path, **more)

    return begin


@pytest.fixture(scope="session")
def acme(start: Start) -> Callable[..., Result]:
    """`acme(how, **variables)`: the eager engines of one process that the short tests share."""
    return lambda how, **variables: start("acme", how, **IN_ONE_PROCESS, **variables)


def test_both_installed_nothing_changes(acme: Callable[..., Result]) -> None:
    alone, beside = acme("alone", **ALONE["acme"]), acme("beside")
    assert_untouched(alone, beside)
    (served,) = beside["served"]
    assert served.keys() >= LAYERS["acme"] | {"attention"} and all(served[n] for n in served)
    assert beside["report"][0]["mode"] == "eager"


def test_one_op_is_taken_by_policy_and_the_others_stay(acme: Callable[..., Result]) -> None:
    alone, taken = acme("alone", **ALONE["acme"]), acme("silu", **SILU)
    (served,), (stock,) = taken["served"], alone["served"]
    assert served.pop("SiluAndMul", 0) == 0 and stock.pop("SiluAndMul") > 0
    assert served == stock
    (report,) = taken["report"]
    assert report["ops"]["silu_and_mul"]["impl"] == "reference.torch"
    assert report["calls"]["silu_and_mul"]["reference.torch"] >= 2 * taken["steps"]  # layers
    assert taken["tokens"] == alone["tokens"]


@pytest.mark.slow
def test_one_setting_goes_back(acme: Callable[..., Result]) -> None:
    alone, back = acme("alone", **ALONE["acme"]), acme("back", **SILU, **STOCK)
    assert back["tokens"] == alone["tokens"] and back["logits"] == alone["logits"]
    assert back["served"] == alone["served"]


@pytest.mark.slow
def test_all_ops_are_taken_and_one_is_left_to_the_vendor(acme: Callable[..., Result]) -> None:
    reached = ("rms_norm", "silu_and_mul", "rotary_embedding")
    everything = ";".join(f"{op}=reference|foreign" for op in reached)
    alone, taken = acme("alone", **ALONE["acme"]), acme("all", VLLM_FL_PER_OP=everything)
    (served,), (stock,) = taken["served"], alone["served"]
    for layer in ("RMSNorm", "SiluAndMul", "RotaryEmbedding"):
        assert served.pop(layer, 0) == 0 and stock.pop(layer) > 0
    assert served == stock  # what no op describes
    assert taken["tokens"] == alone["tokens"]

    order = everything.replace("rms_norm=reference|foreign", "rms_norm=foreign|reference")
    left = acme("left", VLLM_FL_PER_OP=order)
    (served,), (stock,) = left["served"], acme("alone", **ALONE["acme"])["served"]
    assert served["RMSNorm"] == stock["RMSNorm"] and not served.get("SiluAndMul")
    assert left["report"][0]["ops"]["rms_norm"]["impl"] == "foreign"


@pytest.mark.slow
@pytest.mark.parametrize("plugin", ["acme", "forge"])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_processes_ranks_and_compilers_change_nothing_either(
    plugin: str, eager: bool, ranks: int, start: Start
) -> None:
    alone = start(plugin, "alone-spawned", eager=eager, ranks=ranks, **ALONE[plugin])
    beside = start(plugin, "beside-spawned", eager=eager, ranks=ranks)
    assert_untouched(alone, beside)
    seen = LAYERS[plugin] | {"attention"} | ({"all_reduce"} if ranks > 1 else set())
    for served in beside["served"]:
        assert {name for name in served if served[name]} >= seen
    assert len(beside["served"]) == ranks
    if plugin == "acme" and not eager:  # whose compiler keeps nothing
        assert all(calls["graphs"] for calls in beside["updates"][0]["answers"])


@pytest.mark.slow
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_forked_processes_change_nothing_either(eager: bool, start: Start) -> None:
    alone = start("acme", "alone-forked", eager=eager, ranks=2, **FORKED, **ALONE["acme"])
    beside = start("acme", "beside-forked", eager=eager, ranks=2, **FORKED)
    assert_untouched(alone, beside)


@pytest.mark.slow
@pytest.mark.parametrize("plugin", ["acme", "forge"])
def test_one_op_is_taken_in_compiled_code(plugin: str, start: Start) -> None:
    alone = start(plugin, "alone-spawned", eager=False, **ALONE[plugin])
    taken = start(plugin, "silu", eager=False, **SILU)
    (served,), (stock,) = taken["served"], alone["served"]
    assert served.pop("SiluAndMul", 0) == 0 and stock.pop("SiluAndMul") > 0
    assert served == stock
    assert taken["report"][0]["ops"]["silu_and_mul"]["impl"] == "reference.torch"
    assert taken["tokens"] == alone["tokens"]


@pytest.mark.slow
def test_attention_of_ours_serves_in_the_vendors_worker(
    acme: Callable[..., Result], tmp_path: Path
) -> None:
    uses = tmp_path / "uses"
    ours = {"VLLM_FL_PLUGIN_MODULES": "counting_attention", "COUNTING_FILE": str(uses)}
    order = {"VLLM_FL_PER_OP": "attention_backend=vendor:counting|stock"}
    alone, left = acme("alone", **ALONE["acme"]), acme("attention-left", **ours)
    assert_untouched(alone, left)
    assert not uses.exists()
    taken = acme("attention", **ours, **order)
    (served,), (stock,) = taken["served"], alone["served"]
    assert served.pop("attention", 0) == 0 and stock.pop("attention") > 0
    assert served == stock and uses.stat().st_size > 0
    assert taken["report"][0]["ops"]["attention_backend"]["impl"] == "vendor.counting"
    assert taken["tokens"] == alone["tokens"] and taken["logits"] == alone["logits"]


@pytest.mark.slow
def test_orders_by_size_serve_beside_the_vendors_pass_manager(start: Start, tmp_path: Path) -> None:
    """A pass of ours would inline them: the manager is the vendor's own, and is left alone."""
    config = tmp_path / "fl.yaml"
    config.write_text(ROWS)
    alone = start("acme", "alone-spawned", eager=False, **ALONE["acme"])
    ours = start("acme", "rows", eager=False, VLLM_FL_OP_CONFIG=str(config))
    (report,) = ours["report"]
    assert report["ops"]["silu_and_mul"]["rows"][0]["impl"] == "reference.torch"
    assert report["ranges"] == {}
    assert all(calls["graphs"] for calls in ours["updates"][0]["answers"])
    assert ours["tokens"] == alone["tokens"]
    assert report["fallbacks"] == report["demotions"] == {}
