"""The example plugin `veto`: third-party objections at each moment, and its session."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from small_workers import answers

pytest.importorskip("vllm", reason="vLLM is not installed")

ROOT = Path(__file__).parents[3]

BODY = """
get_default_manager().ensure_initialized("cpu", defer_errors=True)
get_default_manager().registry.register_many([silu("vendor.acme", fn=right)])
asked = {"VLLM_FL_PREFER": "vendor", "VLLM_FL_PREFLIGHT": "off"}
worker = planned_worker(asked)
other = int(os.environ["VETO_RANK"]) == 1


def exchange(what, mine, failure=""):
    if failure:
        raise ranks_failed(failure)
    # The other rank has the same plugin, and says what it says there.
    theirs = mine
    if other and isinstance(mine, Opinion) and f"({os.environ['VETO_AT']})" in what:
        engine = worker.vllm_fl_engine
        engine.rank = 1
        (plugin,) = [p for p in get_default_manager().registry.plugins if p.owner.plugin == "veto"]
        theirs = Opinion(
            objections(plugin, engine, os.environ["VETO_AT"]), verifiers=mine.verifiers)
        engine.rank = 0
    return [mine, theirs]


engines.exchange = exchange
result = {}
try:
    worker.init_device()
    worker.load_model()
    worker.compile_or_warm_up_model()
    worker.compile_or_warm_up_model()  # as vLLM does when ranks join: nothing is settled again
    result["label"] = worker.vllm_fl_engine.plan.entries["silu_and_mul"].label
    x = torch.randn(3, 1280).bfloat16()
    result["bound"] = [
        vars(act).get("_vllm_fl_plan") is worker.vllm_fl_engine.plan for act in worker.model.blocks]
    worker.reload_weights()
except Exception as error:
    result["raised"] = f"{type(error).__name__}: {error}"
worker.shutdown()
print(json.dumps(result))
"""

CASES = {
    "planned": {"VETO_RANK": "1"},
    "loaded": {"VETO_RANK": "1"},
    "cached": {"VETO_RANK": "0"},
    "compiled": {"VETO_RANK": "1", "VETO_AT": "cached", "EAGER": ""},
    "updated": {"VETO_RANK": "1"},
    "failing": {"VETO_RANK": "0", "VETO_AT": "loaded", "STRICT": "1"},
}
"""Name -> the rank that objects, and differences from the default: eager, at the moment `name`."""


@cache
def engines() -> dict[str, tuple[Any, str]]:
    """Name -> (results of an engine of two ranks, its log)."""
    cases = {name: {"VETO_AT": name, "EAGER": "1", **more} for name, more in CASES.items()}
    path = str(ROOT / "examples")
    return answers(BODY, cases, PYTHONPATH=path, VLLM_FL_PLUGIN_MODULES="veto")


@pytest.mark.parametrize("moment", ["planned", "loaded", "cached"])
def test_a_veto_on_one_rank_disables_on_all_and_binds_again(moment: str) -> None:
    result, log = engines()[moment]
    rank = CASES[moment]["VETO_RANK"]
    assert result == {"label": "stock", "bound": [moment != "planned"] * 2}
    warning = f"vetoed when it was {moment} (detected at startup on rank {rank}; disabled on all "
    assert warning in log and "[FL410]" in log
    begins = "stock" if moment == "planned" else "vendor.acme"
    diary = [line.partition("Diary: ")[2] for line in log.splitlines() if "Diary: " in line]
    assert diary == [f"it begins with {begins}", "it serves with stock", "it ends with stock"]


def test_what_is_compiled_ends_the_startup_by_name() -> None:
    result, log = engines()["compiled"]
    assert result["raised"].startswith("StartError: vllm-fl: engine startup failed: rank 1: implem")
    assert (
        "vendor.acme' failed for op 'silu_and_mul': vetoed when it was cached" in result["raised"]
    )
    assert "The model is compiled with it" in result["raised"]
    assert "Diary: it ends with vendor.acme" in log


def test_after_an_update_the_caller_gets_the_veto() -> None:
    result, log = engines()["updated"]
    assert result["raised"].startswith("ServingError: After the weights were updated, verification")
    assert "vetoed when it was updated (found on rank 1)" in result["raised"]
    assert result["label"] == "vendor.acme" and "Diary: it serves with vendor.acme" in log


def test_the_session_ends_if_the_startup_fails() -> None:
    result, log = engines()["failing"]
    assert "in strict mode: rank 0: implementation 'vendor.acme' failed" in result["raised"]
    assert "Diary: it ends" in log and "Diary: it serves" not in log
    assert " planned: " in log, "the plan is logged before the startup ends"
