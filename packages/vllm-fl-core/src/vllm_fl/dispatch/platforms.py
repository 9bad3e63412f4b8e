"""Detection of vLLM's platform on this machine, including platform plugins of other packages."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from ..errors import OwnerError
from ..logs import silence
from ..plugins.breadcrumb import noting
from ..plugins.calling import ENDED
from ..plugins.installed import ENGINE_GROUPS, canonical, entry_points, metadata_of, vllm_release
from ..settings.values import IN_TREE, normalise_platform
from ..text import quote


@dataclass(frozen=True)
class ForeignPlatform:
    """A platform plugin of another distribution that supports this machine. `entry` is the name of
    its entry point, as in VLLM_PLUGINS. `release` is the distribution with its version."""

    entry: str
    distribution: str
    release: str

    @property
    def has_vllms_name(self) -> bool:
        return normalise_platform(self.entry) in IN_TREE

    @property
    def name(self) -> str:
        """The platform's name in settings: the name of its entry point, not of a device. If vLLM
        has a platform with this name, the distribution's name is used instead, because settings
        files of vLLM's platform must not apply."""
        return (
            canonical(self.distribution) if self.has_vllms_name else normalise_platform(self.entry)
        )

    @property
    def named_like_vllms(self) -> str:
        return (
            f"The platform plugin {self.entry!r} of {self.release} has the name of a built-in "
            f"platform of vLLM; its name in settings is {self.name!r}"
        )


def foreign_platform() -> ForeignPlatform | None:
    """Return the platform of another package that vLLM uses on this machine, or None if no such
    plugin supports the machine, or if vLLM ignores plugins (`targets_cpu`)."""
    found = () if targets_cpu() else foreign_platforms()
    return found[0] if found else None


def targets_cpu() -> bool:
    """Whether VLLM_TARGET_DEVICE makes vLLM use its CPU platform and ignore platform plugins."""
    return os.environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu"


def vllm_platform() -> str | None:
    """Return vLLM's built-in platform for this machine, or None. A platform plugin overrides it. If
    vLLM is imported, the result is exact. Otherwise it is determined from vLLM's metadata, and from
    torch if torch is imported."""
    if targets_cpu():
        return "cpu"
    platforms = sys.modules.get("vllm.platforms")
    if platforms is not None:
        detected = platforms.builtin_platform_plugins.items()
        return next((name for name, detect in detected if _answers_here(detect)), None)
    name, version = vllm_release() or ("", "")
    return "cpu" if "cpu" in f"{name} {version}" else torch_platform() if name else None


def torch_platform() -> str | None:
    """Return `cuda`, `rocm` or `xpu` if torch has such a device. Return None if it has none or is
    not imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if torch.cuda.is_available():
        return "rocm" if torch.version.hip else "cuda"
    return "xpu" if torch.xpu.is_available() else None


def _answers_here(detect: Callable[[], object]) -> bool:
    try:
        return detect() is not None
    except Exception:  # vLLM also ignores such a platform
        return False


def foreign_platforms() -> tuple[ForeignPlatform, ...]:
    """Return other packages' platform plugins for this machine. vLLM supports at most one."""
    return tuple(each for each in _answers() if isinstance(each, ForeignPlatform))


def broken_platforms() -> tuple[str, ...]:
    """Return a sentence for each platform plugin that fails. vLLM hides the error."""
    return () if targets_cpu() else tuple(each for each in _answers() if isinstance(each, str))


def _answers() -> list[ForeignPlatform | str | None]:
    """Call the platform plugins of other packages as vLLM does, and return the results."""
    named = os.environ.get("VLLM_PLUGINS")
    allowed = None if named is None else named.split(",")
    return [
        _answer(entry)
        for entry in _installed(tuple(sys.path))
        if entry.name != "fl" and (allowed is None or entry.name in allowed)
    ]


def too_many(others: Sequence[ForeignPlatform], device: str | None = None) -> OwnerError:
    """Return the error for several platforms on one machine. vLLM uses only one."""
    names = ", ".join(f"{each.entry!r} of {each.release}" for each in others)
    asked = f"; VLLM_FL_PLATFORM also selects {device!r}" if device else ""
    return OwnerError(
        f"vLLM supports only one platform plugin, but found {names}{asked}. Choose with the list "
        f"of plugins to load, such as VLLM_PLUGINS=fl,{others[0].entry}; see docs/platforms.md",
        plugin="fl",
        distribution=others[0].distribution,
    )


@lru_cache(maxsize=1)
def _installed(path: tuple[str, ...]) -> list[Any]:
    """Return the platform plugins on this `sys.path`. The result is cached, because startup calls
    this repeatedly."""
    return entry_points(ENGINE_GROUPS[0])


@cache
def _answer(entry: Any) -> ForeignPlatform | str | None:
    """Call a platform plugin of another package. The result is cached, because vLLM calls
    `platform_plugin` several times. The plugin's log lines are hidden, because vLLM calls it again.
    Returns a sentence if it failed, and None if it does not support the machine or is not called
    because it ended an earlier process of this command."""
    name, version, _ = metadata_of(entry.dist) if entry.dist else (entry.value, None, "")
    release = f"{name} {version}" if version else name
    plugin = f"plugin {entry.name!r} for vLLM's platform of {release}"
    if plugin in ENDED:
        return None
    try:
        with noting(f"the platform detection of {plugin}"), silence():
            answer = entry.load()()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"The {plugin} failed: {quote(error)}"
    return None if answer is None else ForeignPlatform(entry.name, name, release)
