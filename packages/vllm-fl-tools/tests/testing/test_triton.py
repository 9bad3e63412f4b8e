"""Triton's interpreter as the kit prepares it, and its errors if that is impossible."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import vllm_fl_tools.testing.triton

KERNELS = Path(__file__).with_name("interpreted_kernels.py")
WITH_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

ASKED = """
import os, sys, types
from vllm_fl_tools.testing.triton import interpreted
assert "triton" not in sys.modules, "the kit imports Triton by itself"
{before}
try:
    interpreted()
except {error} as error:
    print(error)
print(os.environ.get("TRITON_INTERPRET"))
"""


def python(*args: str, **variables: str) -> str:
    """The output of a new Python process, without the caller's TRITON_INTERPRET."""
    mine = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *args],
        env=mine | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def asked(before: str, error: str = "ImportError", **variables: str) -> list[str]:
    """The error of interpreted() after `before`, and the switch afterwards."""
    return python("-c", ASKED.format(before=before, error=error), **variables).splitlines()


def test_without_triton_one_error_says_what_to_install() -> None:
    problem, switch = asked('sys.modules["triton"] = None')
    assert (
        "vllm_fl_tools.testing.triton needs Triton" in problem and "pip install triton" in problem
    )
    assert switch == "None", "half applied"


def test_a_triton_that_is_not_supported_is_named() -> None:
    versions = ["3.5.1", "3.2.0+ascend", "3.10.0", "4.0.0"]
    stub = 'sys.modules["triton"] = types.SimpleNamespace(__version__="{}")\n'
    ask = "try:\n    interpreted()\nexcept ImportError as error:\n    print(error)\n"
    *problems, switch = asked(ask.join(map(stub.format, versions)), TRITON_INTERPRET="0")
    for version, problem in zip(versions, problems, strict=True):
        assert f"installed is {version}" in problem
        assert "3.6 to 3.9" in problem
    assert switch == "0", "half applied"


@WITH_TRITON
def test_a_triton_that_already_compiles_is_an_error() -> None:
    problem, switch = asked("import triton.language", "RuntimeError")
    assert "before interpreted() was called" in problem and "TRITON_INTERPRET=1" in problem
    assert switch == "None", "half applied"


@WITH_TRITON
def test_kernels_compute_what_torch_does() -> None:
    found = [json.loads(line) for line in python(str(KERNELS)).splitlines()]
    assert {case["case"]: case["problem"] for case in found if case["problem"]} == {}
    names = re.findall(r"^def case_(\w+)", KERNELS.read_text(), re.M)
    assert [case["case"] for case in found] == names


def test_nothing_is_counted_where_no_interpreter_is() -> None:
    ask = "from vllm_fl_tools.testing.triton import to_compile\nto_compile().__enter__()"
    done = "try:\n " + ask.replace("\n", "\n ") + "\nexcept RuntimeError as error:\n print(error)"
    assert "call interpreted()" in python("-c", done)


def test_the_plugin_module_of_its_documentation_is_python() -> None:
    """The example can be copied unchanged."""
    text = vllm_fl_tools.testing.triton.__doc__ or ""
    example = text[text.index('    """A plugin') : text.index("With this module")]
    compile("\n".join(line[4:] for line in example.splitlines()), "example", "exec")
