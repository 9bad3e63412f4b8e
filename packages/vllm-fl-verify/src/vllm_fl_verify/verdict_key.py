"""The key of a kept verdict: everything that a startup's verification depends on, except its seed.

An unknown environment variable and any change of an installation change the key, because a needless
verification costs only seconds.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from vllm_fl.dispatch import get_default_manager
from vllm_fl.engine.digest import BENEATH, code_facts, code_hash
from vllm_fl.integration.engines import Engine
from vllm_fl.settings.schema import variables

from .trials import Request
from .verdicts import hashed

WITHOUT_EFFECT = re.compile(
    "config|platform_files|lock|log_level|debug|metrics|shadow|preflight|count_calls|keep_faults.*"
)
"""Settings without effect on the findings of a verification. Files of settings are compared by
content."""

IGNORED = re.compile(
    r"_|(OLD)?PWD|SHLVL|HOME|USER|LOGNAME|HOSTNAME|SHELL|TERM.*|COLUMNS|LINES|LANG|LC_.*|LS_COLORS"
    r"|LESS.*|MAIL|PS\d|EDITOR|PAGER|DISPLAY|WINDOWID|TMP|TEMP|TMPDIR|SSH_.*|XDG_.*|DBUS_.*|SUDO_.*"
    r"|TMUX.*|STY|INVOCATION_ID|JOURNAL_STREAM|SYSTEMD_.*|MANAGERPID|KUBERNETES_.*|RAY_.*|SLURM_.*"
    r"|PMIX?_.*|OMPI_COMM_.*|TORCHELASTIC_.*|PYTEST_.*|_VLLM_FL_.*|(LOCAL_|GROUP_)?RANK|MASTER_ADDR"
    r"|VLLM_DIST_IDENT|PROMETHEUS_MULTIPROC_DIR|.*_PORT(_.*)?|.*_SERVICE_HOST"
    r"|.*_CACHE_(DIR|ROOT|HOME)|.*_VISIBLE_DEVICES"
)
"""Environment variables of sessions, hosts and orchestrators. The ranks and the devices that some
of them select are other parts of the key."""


def verdict_parts(engine: Engine, request: Request) -> dict[str, str]:
    """Return name -> hash of each part in `PARTS`."""
    return {name: hashed(_plain(part(engine, request))) for name, part in PARTS.items()}


def _verification(*_: object) -> object:
    return code_hash("vllm-fl-verify", "vllm_fl_verify"), code_hash("vllm-fl-ops", "vllm_fl_ops")


def _packages(*_: object) -> object:
    """Return the names, versions and times of all installed packages."""
    found = (each for root in map(Path, sys.path) for each in root.glob("*.dist-info"))
    return platform.python_version(), {str(each): _state(each / "RECORD") for each in found}


def _beneath(*_: object) -> object:
    """Return the state of each file of vLLM, torch and Triton with code, which are too large to
    hash."""
    specs = filter(None, map(find_spec, BENEATH))
    roots = (root for spec in specs for root in spec.submodule_search_locations or ())
    walked = ((here, each) for root in roots for here, _, files in os.walk(root) for each in files)
    code = (os.path.join(*each) for each in walked if each[1].endswith((".py", ".so")))
    return hashed(sorted((path, _state(path)) for path in code))  # `_plain` would be slow


def _state(path: str | Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _drivers(*_: object) -> object:
    of_cuda = getattr(torch._C, "_cuda_getDriverVersion", None)
    files = map(Path, ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"))
    kernel = [file.read_text() for file in files if file.is_file()]
    own = torch.version.cuda, torch.version.hip, torch.backends.cudnn.version()
    return own, of_cuda() if of_cuda and torch.cuda.is_available() else None, kernel


def _device(engine: Engine, _: Request) -> object:
    """Return the properties of the device. On CUDA they include the UUID and the number of SMs,
    which differ between MIG instances."""
    device = engine.device
    if device.type != "cpu":
        of = getattr(torch.get_device_module(device), "get_device_properties", None)
        found = of(device.index or 0) if of else engine.facts.device
        return device.type, str(found), str(getattr(found, "uuid", ""))
    capability, about = torch.backends.cpu.get_cpu_capability(), Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.is_file() else ()
    named = {line for line in lines if line.startswith(("model name", "flags", "microcode"))}
    return platform.machine(), capability, named, torch.get_num_threads()


def _ranks(engine: Engine, _: Request) -> object:
    found = vars(engine.config.parallel_config).items()
    sizes = {name: value for name, value in found if name.endswith("_size") or "enable" in name}
    return engine.rank, engine.replica, sizes


def _settings(engine: Engine, _: Request) -> object:
    found = engine.facts.settings.items()
    return {key: each.value for key, each in found if not WITHOUT_EFFECT.fullmatch(key)}


def _plugins(*_: object) -> object:
    """Return all plugins: each may change what others call, such as PyTorch operators."""
    found = get_default_manager().registry.plugins
    return [(p.owner, p.status, code_facts(p.owner, p.module)) for p in found]


def _operators(*_: object) -> object:
    """Return the PyTorch operators with an implementation for each device, and separately the
    operators that Python code has registered."""
    keys = "CPU", "CUDA", "XPU", "PrivateUse1", "AutogradCPU", "AutogradCUDA", "AutogradPrivateUse1"
    found = {key: torch._C._dispatch_get_registrations_for_dispatch_key(key) for key in keys}
    by_python = (name.rsplit("/", 1) for name in torch.library._impls)
    own = [(name, key) for name, key in by_python if name.startswith("aten/") and key in keys]
    return {k: {n for n in some if n.startswith("aten::")} for k, some in found.items()}, {*own}


def _environment(engine: Engine, _: Request) -> object:
    from vllm import envs

    skipped = {*envs.environment_variables, *variables(engine.facts.settings.declared)}
    names = (n for n in os.environ if n not in skipped and not IGNORED.fullmatch(n))
    return getattr(envs, "compile_factors", dict)(), {name: os.environ[name] for name in names}


def _tried(_: Engine, request: Request) -> object:
    roles = [(each.name, bool(each.warm), each.captured) for each in request.roles]
    return roles, request.dtype, request.backend, request.sizes, request.provided


PARTS: Mapping[str, Callable[[Engine, Request], object]] = {
    "implementations": lambda engine, _: engine.contents["ops"],
    "contracts": lambda engine, _: engine.contents["contracts"],
    "plan": lambda engine, _: {**engine.contents, "ops": "", "contracts": ""},
    "verification": _verification,
    "packages": _packages,
    "beneath": _beneath,
    "drivers": _drivers,
    "device": _device,
    "ranks": _ranks,
    "model": lambda engine, _: engine.facts,
    "config": lambda engine, _: engine.config.compute_hash(),
    "settings": _settings,
    "plugins": _plugins,
    "operators": _operators,
    "environment": _environment,
    "tried": _tried,
}
"""Name -> a part of the key. A change of any part verifies everything again."""


def _plain(value: Any) -> Any:
    """Return a value as JSON, equal in all processes."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return sorted(([_plain(key), _plain(each)] for key, each in value.items()), key=json.dumps)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(each) for each in value), key=json.dumps)
    if is_dataclass(value) and not isinstance(value, type):
        names = (each.name for each in fields(value) if each.name != "settings")
        return {name: _plain(getattr(value, name)) for name in names}
    text = getattr(value, "__qualname__", None) or str(value)
    return type(value).__qualname__ if " at 0x" in text else text
