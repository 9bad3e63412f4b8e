"""Names and versions of the machine and of the code that runs on it."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_fl.engine.digest import code_facts, package_versions
from vllm_fl.plugins.plugin import Owner

if TYPE_CHECKING:
    import torch


def identity(device: torch.device, owners: Iterable[Owner]) -> dict[str, str]:
    """Return the device, the driver, and the versions and code hashes of packages, by name.

    Args:
        device: the device that the ops run on.
        owners: the owners of implementations, of ops, and of the libraries that they call.
    """
    import torch

    facts = {"device": device_name(device)}
    if device.type == "cpu":
        facts["processor"] = f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"
    if (driver := _driver(device)) is not None:
        facts["driver"] = driver
    facts |= package_versions()
    for owner in owners:
        # `plugin` is the name of an entry point, unless the user set a module.
        of_code = code_facts(owner, "" if owner.distribution else owner.plugin)
        name = owner.distribution or owner.plugin
        facts[name] = f"{owner.version} {of_code['source']}"
        facts |= of_code.get("kernels", {})
    return dict(sorted(facts.items()))


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """Return torch's name of a device; without one, the device's type."""
    import torch

    named = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return str(named(device.index or 0)) if named is not None else device.type


@cache
def _driver(device: torch.device) -> str | None:
    """Return the version of the NVIDIA driver; None if unknown, or if the device is not CUDA."""
    import subprocess

    if device.type != "cuda":
        return None
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip() or None
