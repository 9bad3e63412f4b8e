"""The kit says the same under `python -O`, which leaves every `assert` out."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import vllm_fl_tools.testing

KERNELS = """
import random, sys
import torch
import torch.nn.functional as F
from vllm_fl.plugins.types import BackendImplKind, OpImpl
from vllm_fl.testing import CHECKS, failures

assert not sys.argv[1:], "this line is nothing under -O"

def sound(x):
    half = x.shape[-1] // 2
    return F.silu(x[..., :half]) * x[..., half:]

def changes_the_process(x):
    torch.set_default_dtype(torch.float64 if x.dtype is torch.float32 else torch.float32)
    return sound(x)

def another_each_time(x):
    return sound(x) * (1 + 1e-6 * random.random())

def wrong_in_a_large_batch(x):
    result = sound(x)
    result[64:] = 0
    return result

def by_value(x):
    return True if not x.numel() or float(x.flatten()[0]) < 1000 else "large"

def found(check, fn, supports=None):
    impl = OpImpl("silu_and_mul", "vendor.acme", BackendImplKind.VENDOR, fn, "acme",
                  supports=supports)
    return next(failures(impl, without=CHECKS.keys() - {check}), None)

torch.manual_seed(0)
for check, fn, supports in (
    ("values", changes_the_process, None),
    ("determinism", another_each_time, None),
    ("preflight", wrong_in_a_large_batch, None),
    ("refusals", sound, by_value),
    ("serving", sound, lambda x: "never"),
):
    print(check, found(check, fn, supports))
    assert not sys.argv[1:]
"""


def test_what_is_wrong_fails_under_python_o() -> None:
    command = [sys.executable, "-O", "-c", KERNELS, "optimised"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if "Failure(" in line or "None" in line]
    assert len(lines) == 5, done.stdout
    assert [line for line in lines if line.endswith(" None")] == []


def test_no_check_is_an_assert() -> None:
    """Also of those that no kernel above fails."""
    found = [
        f"{path.name}:{node.lineno}"
        for path in Path(vllm_fl_tools.testing.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Assert)
    ]
    assert found == []
