"""The tests run on torch_npu's real schemas and meta functions, with numerics on the CPU."""

from __future__ import annotations

from pathlib import Path

import emulated
import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Emulate before a test module is imported."""
    folder = Path(config.rootpath) / "build"
    folder.mkdir(exist_ok=True)
    emulated.count_in(folder / "emulated-npu-calls")
    try:
        emulated.activate()
    except emulated.WheelMissing as missing:
        raise pytest.UsageError(str(missing)) from missing
