"""`vllm-fl rescue` with real engines: what ends, hangs or spoils their start is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_run import Job
from engines import IN_ONE_PROCESS, batches, run

pytestmark = pytest.mark.slow

LIST = "vendor_replacer_blacklist"

Rescue = Callable[..., dict[str, Any]]


@pytest.fixture
def rescue(
    model: Callable[[str], Path], plugin: Callable[..., dict[str, str]], tmp_path: Path
) -> Rescue:
    """`rescue("nan index_select")`: what the command says of a plugin with this fault."""

    def run_verb(fault: str, *modules: str, one_process: bool = True, **more: str) -> Any:
        loaded = plugin(*(modules or ("replaces_aten",)))
        path = os.pathsep.join([loaded["PYTHONPATH"], os.environ.get("PYTHONPATH", "")])
        variables = {**loaded, "PYTHONPATH": path, "REPLACES_ATEN": fault, **more}
        if one_process:
            variables |= IN_ONE_PROCESS
        command = ["rescue", "--model", str(model("qwen3")), "--enforce-eager", "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "vllm_fl_tools.cli", *command],
            env={**os.environ, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        print(f"{fault}: {found['starts']} engine starts, {found['seconds'] / 60:.1f} min")
        return {**found, "exit": done.returncode, "err": done.stderr}

    return run_verb


@pytest.mark.parametrize(
    ("fault", "how"),
    [
        ("abort index_select", "ended"),
        ("nan _log_softmax", "wrong"),
    ],
)
def test_the_replaced_operator_at_fault_is_named(rescue: Rescue, fault: str, how: str) -> None:
    found = rescue(fault)
    (culprit,) = found["culprits"]
    assert found["exit"] == 1 and culprit["how"] == how, found
    assert culprit["parts"] == [f"{LIST} {fault.split()[1]}"]


def test_two_that_fail_only_together_are_named_and_the_written_file_starts(
    rescue: Rescue,
    model: Callable[[str], Path],
    plugin: Callable[..., dict[str, str]],
    tmp_path: Path,
) -> None:
    """As users start: the engine in a process of its own."""
    fault = "together index_select argmax"
    found = rescue(fault, one_process=False)
    (culprit,) = found["culprits"]
    assert {*culprit["parts"]} == {f"{LIST} index_select", f"{LIST} argmax"}, found
    written = tmp_path / found["file"]
    served = run(
        Job(str(model("qwen3")), batches()),
        REPLACES_ATEN=fault,
        VLLM_FL_CONFIG=str(written),
        **plugin("replaces_aten"),
    )
    assert served["tokens"]


def test_an_implementation_a_setting_and_a_plugin_are_named(rescue: Rescue, tmp_path: Path) -> None:

    def forget() -> None:
        for name in ("vllm-fl-rescue.yaml", "vllm-fl-rescue.md"):
            (tmp_path / name).unlink()

    ended = rescue("op", VLLM_FL_PER_OP="silu_and_mul=impl:vendor.replacer")
    assert [c["parts"] for c in ended["culprits"]] == [["op silu_and_mul"]], ended
    forget()
    ended = rescue("none", VLLM_FL_VENDOR_REPLACER_TILE="4096")
    assert [c["parts"] for c in ended["culprits"]] == [["setting vendor_replacer_tile"]], ended
    forget()
    ended = rescue("none", "replaces_aten", "ends_import")
    assert [c["parts"] for c in ended["culprits"]] == [["plugin ends_import"]], ended
    assert ended["beside"] == ["export VLLM_FL_PLUGIN_MODULES=replaces_aten"]
