"""Stand-ins for the FlagCX library, compiled into a folder for FLAGCX_PATH. shared_memory.c is for
ranks with tensors in host memory, nccl.c for ranks on GPUs."""

from __future__ import annotations

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

__all__ = ["built", "built_over_nccl"]

HERE = Path(__file__).parent


def built(folder: Path, *flags: str) -> Path:
    """A folder for FLAGCX_PATH. Without a C compiler the test is skipped."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) here, to build the library that stands in for FlagCX")
    return _compiled(folder, compiler, *flags, str(HERE / "shared_memory.c"), "-lrt")


def built_over_nccl(folder: Path) -> Path:
    """`built` over the NCCL of torch's dependency nvidia-nccl; FileNotFoundError without that
    package or without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError("no C compiler (cc)")
    spec = find_spec("nvidia.nccl")
    for root in spec.submodule_search_locations or () if spec is not None else ():
        library = Path(root, "lib", "libnccl.so.2")
        if library.is_file():
            path = f"-Wl,-rpath,{library.parent}"
            return _compiled(folder, compiler, str(HERE / "nccl.c"), str(library), path)
    raise FileNotFoundError("no package nvidia.nccl with lib/libnccl.so.2")


def _compiled(folder: Path, compiler: str, *arguments: str) -> Path:
    out = folder / "build" / "lib" / "libflagcx.so"
    out.parent.mkdir(parents=True)
    command = [compiler, "-O1", "-shared", "-fPIC", *arguments, "-o", str(out)]
    subprocess.run(command, check=True)
    return folder
