"""After startup: less memory, updated weights, an engine with more positions than its model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from engine_run import BIND, Job
from engines import IN_ONE_PROCESS, REFERENCE, Model, Plugin, Runner, batches, change, run

pytestmark = pytest.mark.slow


def test_a_reload_of_equal_weights_changes_nothing_in_an_engine_longer_than_its_model(
    engine: Runner, model: Model, tmp_path: Path
) -> None:
    """The reference does not support positions beyond its table, so none may be generated."""
    folder = model("qwen3")
    updates = [
        ["reload_weights", {}, True],
        ["reload_weights", {"weights_path": str(tmp_path)}, False],
        ["reload_weights", {"weights_path": str(folder)}, True],
    ]
    job = Job(
        str(folder),
        batches(),
        options={"max_model_len": 4096},
        updates=updates,
        midway="vllm_fl_verify",
    )
    result = run(job, VLLM_ALLOW_LONG_MAX_MODEL_LEN="1", **IN_ONE_PROCESS, **REFERENCE)
    assert result["tokens"] == engine("qwen3", "stock-native")["tokens"]
    log = result["log"]
    assert "calls on live tensors in" in log and "No verification on live tensors" not in log
    equal, fails, again = result["updates"]
    assert equal == again == {"answers": [None], "tokens": result["tokens"]}
    assert "Cannot find any model weights" in fails["error"]
    assert log.count("After the weights were updated: ") == 2
    assert log.count("A weight update failed, and nothing was verified after it") == 1
    (answer,) = result["midway"]["answers"]
    assert "calls on live tensors in" in answer
    last = result["tokens"][-len(batches()[-1]) :]
    assert result["midway"]["tokens"] == last, "of requests that were under way"


@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_engines_of_one_rank_and_of_two_name_it_too(
    model: Model, plugin: Plugin, tmp_path: Path, ranks: int
) -> None:
    folder, other = model("qwen3"), tmp_path / "other"
    shutil.copytree(folder, other)
    change(other)
    weights = ({}, {"weights_path": str(other)}, {"weights_path": str(folder)})
    updates = [["reload_weights", given, True] for given in weights]
    options = {"tensor_parallel_size": ranks} if ranks > 1 else {}
    job = Job(str(folder), batches(), eager=False, options=options, updates=updates)
    orders = {"VLLM_FL_PER_OP": "rms_norm=vendor:afterstart"}
    if ranks > 1:
        orders[BIND] = "0|1"
    result = run(job, **REFERENCE, **orders, **plugin("after_start"))
    equal, changed, again = result["updates"]
    assert equal["tokens"] == again["tokens"] == result["tokens"]
    assert "After the weights were updated, verification failed for" in changed["error"]
    assert "'vendor.afterstart' of op 'rms_norm'" in changed["error"]
    assert all(report["wrong"] == {} for report in result["report"]), "the old ones are back"
