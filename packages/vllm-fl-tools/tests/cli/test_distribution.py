"""What holds for the distribution as a whole: its version, its errors, what it takes of core's."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from commands import Command, Distribution

import vllm_fl_tools
from vllm_fl.cli._verbs import ELSEWHERE
from vllm_fl.errors import VllmFLError
from vllm_fl.plugins.installed import entry_points
from vllm_fl_tools import cli

CODES = {"EngineError": "FL601", "AcceptError": "FL602", "BisectError": "FL603"}
"""Promised, as those of core's own errors: no line is ever changed."""

VERBS = (
    "bisect", "collect", "coverage", "lock", "new", "plan", "report", "show", "tune",
    "verify",
)  # fmt: skip


def test_core_knows_who_brings_these_verbs() -> None:
    ours = [e.name for e in entry_points("vllm_fl.cli") if e.dist.name == "vllm-fl-tools"]
    assert sorted(ours) == sorted(VERBS)
    assert dict(ELSEWHERE) == dict.fromkeys(ours, "vllm-fl-tools")


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb(fl: Command, verb: str) -> None:
    done = fl(verb, "--help")
    assert done.status == 0, done.err
    assert "--json" in done.out
    (line,) = [line for line in fl("--help").out.splitlines() if line.split()[:1] == [verb]]
    assert len(line.split()) > 4


@pytest.mark.parametrize("core", ["0.2.9", "9.0.0"])
def test_core_of_another_version_is_one_line(distribution: Distribution, core: str) -> None:
    site = distribution("vllm-fl-core", core)  # found first
    tools = version("vllm-fl-tools")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "vllm_fl.cli", *arguments]
        env = {**os.environ, "PYTHONPATH": str(site), "VLLM_FL_PLUGINS": ""}
        return subprocess.run(command, check=False, capture_output=True, text=True, env=env)

    done = run("tune", "--model", "DIR")
    assert (done.returncode, done.stdout) == (1, "")
    told, more = done.stderr.splitlines()
    assert told == (
        f"vllm-fl: vllm-fl-tools {tools} works with vllm-fl-core {tools}, and vllm-fl-core {core} "
        f"is installed: pip install 'vllm-fl-tools=={core}', or 'vllm-fl-core[tools]=={tools}' "
        "[FL703]"
    )
    assert "vllm-fl explain FL703" in more
    assert run("ops", "--help").returncode == 0
    assert "works with vllm-fl-core" in " ".join(run("--help").stdout.split())


def test_each_class_of_errors_has_its_code_and_the_code_a_page(fl: Command) -> None:
    for module in pkgutil.iter_modules(cli.__path__):
        importlib.import_module(f"{cli.__name__}.{module.name}")
    found, rest = {}, [VllmFLError]
    while rest:
        cls = rest.pop()
        rest += cls.__subclasses__()
        if cls.__module__.startswith("vllm_fl_tools."):
            found[cls.__name__] = vars(cls).get("code")
    assert found == CODES
    for code in CODES.values():
        assert fl("explain", code).out.startswith(f"# {code}: ")


def test_only_public_modules_and_names_of_core_are_imported() -> None:
    taken = set()
    for path in Path(vllm_fl_tools.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm_fl":
                taken |= {f"{node.module}.{name.name}" for name in node.names}
    assert "vllm_fl.cli.common.say" in taken
    private = {name for name in taken if any(part[0] == "_" for part in name.split("."))}
    assert private == set()
    assert {name for name in taken if name.startswith("vllm_fl.cli")} == {
        name for name in taken if name.startswith("vllm_fl.cli.common.")
    }
