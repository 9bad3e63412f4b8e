"""What holds for the distribution as a whole: its version, its errors, what it takes of core's."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest
from commands import Command

from vllm_fl.errors import VllmFLError
from vllm_fl_tools import cli
from vllm_fl_tools.cli._verbs import VERBS

CODES = {"EngineError": "FL601", "AcceptError": "FL602", "BisectError": "FL603"}
"""Promised, as those of core's own errors: no line is ever changed."""


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb(fl: Command, verb: str) -> None:
    done = fl(verb, "--help")
    assert done.status == 0, done.err
    assert "--json" in done.out
    (line,) = [line for line in fl("--help").out.splitlines() if line.split()[:1] == [verb]]
    assert len(line.split()) > 4


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


def test_help_of_all_verbs_needs_no_torch() -> None:
    code = (
        "import sys\nfrom vllm_fl_tools.cli import main\n"
        "try:\n main(['--help'])\nexcept SystemExit:\n pass\n"
        "assert not {'torch', 'vllm', 'triton', 'numpy', 'matplotlib'} & {*sys.modules}"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
