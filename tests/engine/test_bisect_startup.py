"""`vllm-fl bisect --startup` with real engines finds the part that crashes or corrupts one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_run import Job
from engines import IN_ONE_PROCESS, Model, Plugin, batches, command, path_of, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # dozens of startups

LIST = "vendor_replacer_blacklist"

Bisect = Callable[..., dict[str, Any]]


@pytest.fixture
def bisect(model: Model, plugin: Plugin, tmp_path: Path) -> Bisect:
    """`bisect("nan index_select")`: the result with a plugin that has this fault."""

    def run_verb(fault: str, *modules: str, one_process: bool = True, **more: str) -> Any:
        loaded = plugin(*(modules or ("replaces_aten",)))
        variables = {**loaded, **path_of(loaded["PYTHONPATH"]), "REPLACES_ATEN": fault, **more}
        if one_process:
            variables |= IN_ONE_PROCESS
        words = ("bisect", "--startup", "--model", model("qwen3"), "--enforce-eager", "--json")
        done = command(*words, cwd=tmp_path, **variables)
        assert done.stdout, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        print(f"{fault}: {found['engines']} engines, {found['seconds'] / 60:.1f} min")
        return {**found, "exit": done.returncode, "err": done.stderr}

    return run_verb


@pytest.mark.parametrize(
    ("fault", "how"), [("abort index_select", "ended"), ("nan _log_softmax", "wrong")]
)
def test_the_replaced_operator_at_fault_is_found(bisect: Bisect, fault: str, how: str) -> None:
    found = bisect(fault)
    (culprit,) = found["culprits"]
    assert found["exit"] == 1 and culprit["how"] == how, found
    assert culprit["parts"] == [f"{LIST} {fault.split()[1]}"]


def test_two_that_fail_only_together_are_found_and_an_engine_starts_without_them(
    bisect: Bisect, model: Model, plugin: Plugin
) -> None:
    """Started as users do: with the engine in its own process."""
    fault = "together index_select argmax"
    found = bisect(fault, one_process=False)
    (culprit,) = found["culprits"]
    assert {*culprit["parts"]} == {f"{LIST} index_select", f"{LIST} argmax"}, found
    settings = dict(line.removeprefix("export ").split("=", 1) for line in found["settings"])
    job = Job(str(model("qwen3")), batches())
    served = run(job, REPLACES_ATEN=fault, **settings, **plugin("replaces_aten"))
    assert served["tokens"]


def test_an_implementation_a_setting_and_a_plugin_are_found(bisect: Bisect) -> None:
    order = {"VLLM_FL_PER_OP": "silu_and_mul=impl:vendor.replacer"}
    for modules, variables, part in (
        ((), order, "op silu_and_mul"),
        ((), {"VLLM_FL_VENDOR_REPLACER_TILE": "4096"}, "setting vendor_replacer_tile"),
        (("replaces_aten", "ends_import"), {}, "plugin ends_import"),
    ):
        found = bisect("op" if variables is order else "none", *modules, **variables)
        assert [c["parts"] for c in found["culprits"]] == [[part]], found
    assert found["settings"] == ["export VLLM_FL_PLUGIN_MODULES=replaces_aten"]
