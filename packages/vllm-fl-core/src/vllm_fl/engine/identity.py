"""What measured times hold for: the machine, and the code that ran on it."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..contracts import OpSpec
from ..contracts.meaning import contract_digest
from ..plugins.plugin import Owner
from .digest import code_facts, versions

if TYPE_CHECKING:
    import torch

THREADS = "threads"
"""The name under which a CPU has how many of its threads compute."""


def identity(device: torch.device, owners: Iterable[Owner]) -> dict[str, str]:
    """What a table of times was measured with, by name; where one differs, the times do.

    Args:
        device: on which the ops run.
        owners: who brought the implementations and the ops. Each is known by its version and its
            code, and so are the libraries whose kernels it calls.
    """
    import torch

    facts = {"device": _name(device)}
    if (driver := _driver(device)) is not None:
        facts["driver"] = driver
    if device.type == "cpu":
        facts[THREADS] = str(torch.get_num_threads())
    facts |= versions()
    for owner in owners:
        # The name of an entry point is no module's; that of a module which the user named is.
        of_code = code_facts(owner, "" if owner.distribution else owner.plugin)
        name = owner.distribution or owner.plugin
        facts[name] = f"{owner.version} {of_code['source']}"
        facts |= of_code.get("kernels", {})
    return dict(sorted(facts.items()))


def is_measured(spec: OpSpec, told: str) -> bool:
    """Whether a table was measured by a contract, whose digest it tells as `told`."""
    return told == contract_digest(spec)


def cpu_name() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _name(device: torch.device) -> str:
    import torch

    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device.type == "cpu":
        vectors = torch.backends.cpu.get_cpu_capability()
        return f"{cpu_name()}, {vectors}"
    named = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return str(named(device.index or 0)) if named is not None else device.type


@cache
def _driver(device: torch.device) -> str | None:
    """The version of the device's driver, where torch or its vendor's tool tells it."""
    import subprocess

    if device.type != "cuda":
        return None
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip() or None
