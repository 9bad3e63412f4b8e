"""GPU and versions of a measurement."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = ["facts", "memory_gib"]

DISTRIBUTIONS = (
    "torch",
    "triton",
    "vllm",
    "flag-gems",
    "vllm-fl-core",
    "vllm-fl-reference",
    "vllm-fl-cuda",
    "vllm-fl-flaggems",
)


@cache
def facts() -> dict[str, Any]:
    """Name, driver and clocks of the GPU, and installed releases; does not initialise CUDA."""
    query = "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit"
    asked = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "gpus": asked.stdout.splitlines(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in DISTRIBUTIONS},
    }


def memory_gib() -> float:
    """Memory of the first GPU in GiB."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    asked = subprocess.run(query, capture_output=True, text=True, check=True)
    return int(asked.stdout.splitlines()[0]) / 1024


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
