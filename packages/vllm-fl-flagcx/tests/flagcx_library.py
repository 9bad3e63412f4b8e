"""The library that stands in for FlagCX: shared_memory.c, compiled as a FLAGCX_PATH has it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("shared_memory.c")


def built(folder: Path, *flags: str) -> Path:
    """A folder for FLAGCX_PATH. Without a C compiler the test is skipped."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) here, to build the library that stands in for FlagCX")
    out = folder / "build" / "lib" / "libflagcx.so"
    out.parent.mkdir(parents=True)
    command = [compiler, "-O1", "-shared", "-fPIC", *flags, str(SOURCE), "-o", str(out), "-lrt"]
    subprocess.run(command, check=True)
    return folder
