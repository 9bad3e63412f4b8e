"""Core only; without the ops; without verification; and everything without a backend."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_run import EngineFailed, Job

from installed import Install

OPS, VERIFY, TOOLS = "vllm-fl-ops", "vllm-fl-verify", "vllm-fl-tools"


def test_core_imports_without_the_others(install: Install) -> None:
    modules = install(without=(OPS, VERIFY, TOOLS)).script(
        """
import importlib, json, pkgutil
names = []
for room in ("", ".dispatch", ".contracts", ".plugins", ".settings"):
    package = "vllm_fl" + room
    path = importlib.import_module(package).__path__
    for module in pkgutil.iter_modules(path, package + "."):
        if not module.ispkg:
            names.append(importlib.import_module(module.name).__name__)
print(json.dumps(names))
"""
    )
    assert "vllm_fl.plugins.loading" in modules


def test_the_command_imports_without_torch_and_lists_what_is_installed(install: Install) -> None:
    plugins = install().answer("doctor", status=1)["plugins"]
    assert {(each["name"], each["distribution"], each["status"]) for each in plugins} == {
        ("ops", OPS, "ok"),
        ("operate", TOOLS, "ok"),
        ("verify", VERIFY, "ok"),
    }
    assert "pip install vllm-fl-reference" in install().command("doctor").stdout
    done = install().command("tune", "--model", ".")
    assert done.returncode == 2 and "torch cannot be imported" in done.stderr


def test_ops_lists_every_contract_without_a_candidate(install: Install) -> None:
    ops = install().ops()
    contracts = install().script(
        "import json; from vllm_fl.plugins.registry import known_contracts; "
        "print(json.dumps([*known_contracts().contracts]))"
    )
    assert "rms_norm" in contracts and set(ops) >= set(contracts)
    assert all(ops[op] == {"selected": None, "candidates": []} for op in contracts)


def test_a_call_says_what_to_install(install: Install) -> None:
    error = install().script(
        """
import json
from vllm_fl.dispatch import call_op
from vllm_fl.errors import NoImplementationError
try:
    call_op("silu_and_mul", None)
except NoImplementationError as error:
    print(json.dumps({"op": error.op, "message": str(error)}))
"""
    )
    assert error["op"] == "silu_and_mul"
    assert "pip install" in error["message"]


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("doctor --nonsense", "--nonsense"),
        ("nonsense", "'nonsense'"),
        ("explain", "OP"),
        ("explain rms_nrom", "'rms_norm'"),
    ],
)
def test_wrong_usage_is_status_2(install: Install, typed: str, text: str) -> None:
    done = install().command(*typed.split())
    assert done.returncode == 2
    assert text in done.stderr and "Traceback" not in done.stderr


MISSING = "vllm-fl-ops is not installed: pip install vllm-fl-ops"


def test_without_the_ops_each_verb_says_what_to_install(install: Install) -> None:
    alone = install(without=(OPS,))
    asked = (
        "from vllm_fl.plugins.registry import known_contracts; "
        "print(len(known_contracts().contracts))"
    )
    assert alone.script(asked) == 0
    listed = alone.command("plan")
    assert f"No op has a contract: {MISSING}." in listed.stdout
    explained = alone.command("explain", "rms_norm")
    assert explained.returncode == 2
    assert f"Contracts are missing: {MISSING}. [FL301]" in explained.stderr
    found = {f["code"]: f for f in alone.answer("doctor", status=1)["findings"]}
    assert found["FL217"]["what"] == "vllm-fl-ops is not installed."
    assert found["FL217"]["todo"] == "pip install vllm-fl-ops"


@pytest.mark.slow
def test_a_backend_without_the_ops_runs_nothing_unverified(install: Install) -> None:
    installed = install("vllm-fl-reference", engine=True, without=(OPS,))
    done = installed.command("explain", "rms_norm")
    assert done.returncode == 2
    assert MISSING in done.stderr.splitlines()[-2]
    assert "FL217" in {f["code"] for f in installed.answer("doctor", status=1)["findings"]}


@pytest.mark.slow
def test_a_backend_without_the_ops_dependency_gets_a_message(install: Install) -> None:
    installed = install("fl-old-form", engine=True)
    (finding,) = installed.answer("doctor", status=1)["findings"]
    assert finding["code"] == "FL217"
    assert (
        finding["what"] == "fl-old-form 1.0 implements ops of vllm-fl-ops, but does not require it."
    )


PROMPTS = [[[7, 11, 13, 17, 19, 23, 29, 31]]]


@pytest.mark.slow
def test_core_alone_serves_with_stock(install: Install, tmp_path: Path) -> None:
    installed = install(engine=True, without=(OPS, VERIFY, TOOLS))
    assert installed.serve(Job(installed.model(tmp_path), PROMPTS))["tokens"]


@pytest.mark.slow
def test_without_verification_no_backend_serves_unless_it_is_switched_off(
    install: Install, tmp_path: Path
) -> None:
    installed = install("vllm-fl-reference", engine=True, without=(VERIFY,))
    job = Job(installed.model(tmp_path), PROMPTS)
    line = "plugin verifies kernels: pip install vllm-fl-verify, or set VLLM_FL_PREFLIGHT=off"
    with pytest.raises(EngineFailed, match=line):
        installed.serve(job, VLLM_FL_PREFER="reference")
    off = installed.serve(job, VLLM_FL_PREFER="reference", VLLM_FL_PREFLIGHT="off")
    assert "reference.torch" in off["log"]
    assert installed.serve(job, VLLM_FL_PREFER_ENABLED="false")["tokens"]
    called = "import torch; from vllm_fl.dispatch import call_op; "
    called += "print(list(call_op('silu_and_mul', torch.ones(1, 4)).shape))"
    assert installed.script(called) == [1, 2]
