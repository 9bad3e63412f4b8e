"""The tests run on torch_npu's real schemas and meta functions, with numerics on the CPU."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import emulated
import pytest
import torch

HERE = Path(__file__).parent
COUNTS = Path(tempfile.mkdtemp()) / "calls"


def pytest_configure(config: pytest.Config) -> None:
    """Emulate before any test module is imported, and in child processes of tests."""
    try:
        emulated.activate()
    except emulated.WheelMissing as missing:
        raise pytest.UsageError(str(missing)) from missing
    emulated.count_in(COUNTS)
    torch.set_num_threads(1)  # tensors are small, and on a busy machine threads wait for each other
    os.environ["VLLM_FL_PLUGIN_MODULES"] = "emulated.plugin"
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(HERE), os.environ.get("PYTHONPATH")))
    )


def pytest_unconfigure() -> None:
    shutil.rmtree(COUNTS.parent, ignore_errors=True)
