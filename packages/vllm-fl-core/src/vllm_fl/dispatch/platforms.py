"""The platform of vLLM's that another distribution's plugin brings: who answers on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from ..errors import OwnerError
from ..logs import silence
from ..plugins.breadcrumb import running
from ..plugins.calling import ENDED
from ..plugins.installed import ENGINE_GROUPS, canonical, entry_points, identity, vllm_release
from ..settings.values import IN_TREE, normalise_platform
from ..text import quote


@dataclass(frozen=True)
class ForeignPlatform:
    """A platform plugin of vLLM's that is not ours and answers here.

    Args:
        entry: its entry point's name, as VLLM_PLUGINS has it.
        distribution: who brings it.
        release: the distribution with its version.
    """

    entry: str
    distribution: str
    release: str

    @property
    def has_vllms_name(self) -> bool:
        """Whether its entry point is named like a platform of vLLM's own."""
        return normalise_platform(self.entry) in IN_TREE

    @property
    def name(self) -> str:
        """What settings call the platform: by its entry point, never by a class's device name.

        The distribution's name, where files for a platform of vLLM's own would apply.
        """
        return (
            canonical(self.distribution) if self.has_vllms_name else normalise_platform(self.entry)
        )

    @property
    def named_like_vllms(self) -> str:
        """What is said of such a name, in one sentence."""
        return (
            f"The platform plugin {self.entry!r} of {self.release} has the name of a platform of "
            f"vLLM's own; settings call it {self.name!r}"
        )


def foreign_platform() -> ForeignPlatform | None:
    """The one whose class vLLM takes; None where nobody else's answers, or vLLM asks nobody."""
    found = () if targets_cpu() else foreign_platforms()
    return found[0] if found else None


def targets_cpu() -> bool:
    """Whether VLLM_TARGET_DEVICE makes vLLM take its platform for the CPU and ask no plugin."""
    return os.environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu"


def vllms_own() -> str | None:
    """The platform of its own that vLLM takes here where no plugin answers; None for none.

    Exact where vLLM is imported. Elsewhere as its build and torch tell, which are not imported.
    """
    if targets_cpu():
        return "cpu"
    platforms = sys.modules.get("vllm.platforms")
    if platforms is not None:
        detected = platforms.builtin_platform_plugins.items()
        return next((name for name, detect in detected if _answers_here(detect)), None)
    name, version = vllm_release() or ("", "")
    return "cpu" if "cpu" in f"{name} {version}" else torchs_own() if name else None


def torchs_own() -> str | None:
    """The same of the devices that PyTorch has itself; None before torch is imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if torch.cuda.is_available():
        return "rocm" if torch.version.hip else "cuda"
    return "xpu" if torch.xpu.is_available() else None


def _answers_here(detect: Callable[[], object]) -> bool:
    try:
        return detect() is not None
    except Exception:  # as vLLM takes it
        return False


def foreign_platforms() -> tuple[ForeignPlatform, ...]:
    """Other distributions' platform plugins that answer here; vLLM takes one, and no more."""
    return tuple(each for each in _answers() if isinstance(each, ForeignPlatform))


def broken_platforms() -> tuple[str, ...]:
    """One sentence for each platform plugin that fails: vLLM hides the error and ignores it."""
    return () if targets_cpu() else tuple(each for each in _answers() if isinstance(each, str))


def _answers() -> list[ForeignPlatform | str | None]:
    """The answers of other distributions' plugins, asked as vLLM asks them."""
    named = os.environ.get("VLLM_PLUGINS")
    allowed = None if named is None else named.split(",")
    return [
        _answer(entry)
        for entry in _installed(tuple(sys.path))
        if entry.name != "fl" and (allowed is None or entry.name in allowed)
    ]


def too_many(others: Sequence[ForeignPlatform], device: str | None = None) -> OwnerError:
    """The error of platforms of which vLLM takes one.

    Args:
        others: those that answer.
        device: the device of a plugin of ours that VLLM_FL_PLATFORM asks for beside them, or None.
    """
    told = ", ".join(f"{each.entry!r} of {each.release}" for each in others)
    asked = f"; VLLM_FL_PLATFORM asks for {device!r} beside it" if device else ""
    return OwnerError(
        f"vLLM takes one platform plugin, and here answer: {told}{asked}. VLLM_PLUGINS names the "
        f"plugins that vLLM loads, such as VLLM_PLUGINS=fl,{others[0].entry}; docs/platforms.md",
        plugin="fl",
        distribution=others[0].distribution,
    )


@lru_cache(maxsize=1)
def _installed(path: tuple[str, ...]) -> list[Any]:
    """The platform plugins on this `sys.path`. A start asks several times, and reads them once."""
    return entry_points(ENGINE_GROUPS[0])


@cache
def _answer(entry: Any) -> ForeignPlatform | str | None:
    """Ask another platform plugin, once: vLLM asks us several times.

    Its log lines are not shown: vLLM calls the plugin as well.

    Returns:
        A sentence if it failed; None if it declines, or ended an earlier process of this command.
    """
    name, version, _ = identity(entry.dist) if entry.dist else (entry.value, None, "")
    release = f"{name} {version}" if version else name
    whose = f"plugin {entry.name!r} for vLLM's platform of {release}"
    if whose in ENDED:  # it ended a process of this command before
        return None
    try:
        with running(f"the answer of {whose}"), silence():
            answer = entry.load()()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"The {whose} failed: {quote(error)}"
    return None if answer is None else ForeignPlatform(entry.name, name, release)
