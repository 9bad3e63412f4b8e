"""Core with no backend, no torch and no vLLM beside it; and with no ops."""

from __future__ import annotations

import pytest

from installed import Install


def test_what_a_script_and_the_command_line_need_imports(install: Install) -> None:
    imported = install().script(
        """
import importlib, json, pkgutil
import vllm_fl.plugins.loading
names = []
for package in ("vllm_fl", "vllm_fl_tools.cli", "vllm_fl.dispatch", "vllm_fl.contracts"):
    names.append(importlib.import_module(package).__name__)
for package in (vllm_fl_tools.cli, vllm_fl.contracts):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        names.append(importlib.import_module(module.name).__name__)
for op in ("rms_norm", "linear"):
    names.append(importlib.import_module(f"vllm_fl.contracts.{op}").__name__)
print(json.dumps(names))
"""
    )
    # As names of 0.2: the modules are those of the ops.
    assert {f"vllm_fl_ops.contracts.{op}" for op in ("rms_norm", "linear")} <= set(imported)


def test_plugins_lists_the_ops_alone_and_says_what_to_install(install: Install) -> None:
    (*extensions, ops) = install().answer("plugins", status=0)["plugins"]
    assert [(each["name"], each["status"]) for each in extensions] == [
        ("operate", "ok"),
        ("verify", "ok"),
    ]
    assert (ops["name"], ops["status"], ops["hooks"]) == ("ops", "ok", ["contracts"])
    assert "pip install vllm-fl-reference" in install().command("plugins").stdout


def test_ops_lists_every_contract_without_a_candidate(install: Install) -> None:
    ops = install().ops()
    contracts = install().script(
        "import json; from vllm_fl.contracts import contracts; print(json.dumps([*contracts()]))"
    )
    assert "rms_norm" in contracts and set(ops) >= set(contracts)
    for op in contracts:
        assert ops[op]["candidates"] == []
        assert ops[op]["selected"] is None


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


@pytest.mark.parametrize("arguments", [["plugins", "--nonsense"], ["nonsense"], ["explain"]])
def test_wrong_usage_is_status_2(install: Install, arguments: list[str]) -> None:
    done = install().command(*arguments)
    assert done.returncode == 2
    assert done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("verb", ["tune", "bisect", "coverage", "plan", "report", "verify", "new"])
def test_a_verb_of_the_tools_says_how_to_get_it(install: Install, verb: str) -> None:
    done = install().command(verb, "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"vllm-fl: `vllm-fl {verb}` is not installed; vllm-fl-tools brings it: "
        "pip install vllm-fl-tools, or 'vllm-fl-core[tools]' [FL701]\n"
    )
    assert verb not in install().command("--help").stdout.split()


def test_the_tools_need_neither_torch_nor_vllm_to_be_listed(install: Install) -> None:
    installed = install("vllm-fl-tools")
    assert {"tune", "bisect", "report", "coverage", "ops"} <= {
        *installed.command("--help").stdout.split()
    }
    assert installed.command("report", "--help").returncode == 0
    done = installed.command("tune", "--sizes", "hidden=64")
    assert done.returncode == 2 and "torch cannot be imported" in done.stderr


def test_an_op_that_nobody_knows_is_named(install: Install) -> None:
    done = install().command("explain", "rms_nrom")
    assert done.returncode in (1, 2)
    assert "rms_norm" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


MISSING = "vllm-fl-ops is not installed: pip install vllm-fl-ops"


def test_without_the_ops_each_verb_says_what_to_install(install: Install) -> None:
    alone = install(ops=False)
    asked = "from vllm_fl.contracts import contracts; print(len(contracts()))"
    assert alone.script(asked) == 0
    listed = alone.command("ops")
    assert listed.returncode == 1 and f"No op has a contract here: {MISSING}." in listed.stdout
    explained = alone.command("explain", "rms_norm")
    assert explained.returncode == 2
    assert f"Contracts are missing here: {MISSING}. [FL301]" in explained.stderr
    found = {f["code"]: f for f in alone.answer("doctor", status=1)["findings"]}
    assert found["FL217"]["what"] == "vllm-fl-ops is not installed."
    assert found["FL217"]["todo"] == "pip install vllm-fl-ops"


@pytest.mark.slow
def test_a_backend_without_the_ops_runs_nothing_unverified(install: Install) -> None:
    installed = install("vllm-fl-reference", engine=True, ops=False)
    done = installed.command("explain", "rms_norm")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2].endswith(
        "has no contract, by which 'reference.torch' of vllm-fl-reference "
        f"{installed.plugins(status=0)['vllm-fl-reference']['version']} would be verified: "
        f"{MISSING}. [FL201]"
    )
    assert "FL217" in {f["code"] for f in installed.answer("doctor", status=1)["findings"]}


@pytest.mark.slow
def test_a_backend_that_does_not_ask_for_the_ops_is_told(install: Install) -> None:
    installed = install("fl-old-form", engine=True)
    (finding,) = installed.answer("doctor", status=1)["findings"]
    assert finding["code"] == "FL217"
    assert (
        finding["what"] == "fl-old-form 1.0 implements ops of vllm-fl-ops, and does not require it."
    )
