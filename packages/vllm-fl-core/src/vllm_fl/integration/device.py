"""Out-of-tree hardware: the platform that a plugin's device profile brings."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from ..dispatch import get_default_manager
from ..dispatch.startup import try_settings
from ..errors import DeviceError
from ..logs import get_logger, silence
from ..plugins.breadcrumb import running
from ..plugins.calling import ENDED, devices, find_device
from ..plugins.installed import ENGINE_GROUPS, identity
from ..plugins.types import DeviceProfile

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["IN_TREE", "detect_device", "other_platforms", "profile_named"]

log = get_logger("engine")

IN_TREE = ("cpu", "cuda")
"""The platforms that we know of vLLM's own, as settings name them."""


def detect_device(forced: str | None) -> DeviceProfile | None:
    """The device that a plugin brings to this machine, with the settings of its platform read.

    Args:
        forced: the platform that VLLM_FL_PLATFORM names, or None.

    Raises:
        DeviceError: two devices claim the machine, or the forced one is not there.
    """
    manager = get_default_manager()
    manager.ensure_initialized(defer_errors=True)
    startup = manager.startup
    assert startup is not None  # the default manager finds its own plugins
    profile = find_device(startup.plugins, forced)
    if profile is not None and startup.settings.platform != profile.name:
        registry = manager.registry
        settings, problem = try_settings(registry, startup.plugins, platform=profile.name)
        manager.use_startup(replace(startup, settings=settings, problem=problem), registry)
    return profile


def profile_named(name: str) -> DeviceProfile:
    """The profile of this name.

    Raises:
        DeviceError: no loaded plugin brings it, as where a worker lacks the plugin.
    """
    startup = get_default_manager().startup
    known, errors = devices(startup.plugins if startup else ())
    for _, profile in known:
        if profile.name == name:
            return profile
    if errors:
        raise errors[0]
    raise DeviceError(
        f"No loaded plugin brings the device {name!r} on this host; install the same distributions "
        "wherever a process of one engine runs.",
        plugin=name,
    )


def other_platforms() -> tuple[str, ...]:
    """Other distributions whose platform plugin answers here too: vLLM takes one, and no more.

    Returns:
        One sentence for each, with what to do. They are asked as vLLM asks them, VLLM_PLUGINS
        included; one that fails is out for vLLM as well.
    """
    from importlib.metadata import entry_points  # vLLM's own way to them

    allowed = os.environ.get("VLLM_PLUGINS")
    found = []
    for entry in entry_points(group=ENGINE_GROUPS[0]):
        if entry.name == "fl" or (allowed is not None and entry.name not in allowed.split(",")):
            continue
        name, version, _ = identity(entry.dist) if entry.dist else (entry.value, None, "")
        answer = _answer(entry, f"{name} {version}" if version else name)
        if answer is not None:
            found.append(
                f"{name} brings a platform of vLLM's too ({entry.name!r}: {answer}), and vLLM "
                f"takes one only. pip uninstall -y {name}, or choose: VLLM_PLUGINS=fl for vllm-fl, "
                f"VLLM_PLUGINS={entry.name} for {name}"
            )
    return tuple(found)


_answers: dict[tuple[str, str], object] = {}
"""(name, value) of an entry point -> what it has answered in this process."""


def _answer(entry: EntryPoint, release: str) -> object:
    """What another platform plugin answers. It is asked once: vLLM asks us several times.

    It is asked in silence, since vLLM asks it, too, and then it says what it has to say.
    """
    key = entry.name, entry.value
    if key not in _answers:
        whose = f"plugin {entry.name!r} for vLLM's platform of {release}"
        if whose in ENDED:  # it ended a process of this command before
            return None
        answer = None
        try:
            with running(f"the answer of {whose}", release), silence():
                answer = entry.load()()
        except KeyboardInterrupt:
            raise
        except BaseException:  # vLLM takes it for one that does not answer
            log.debug("platform plugin %r of %s failed", entry.name, release, exc_info=True)
        _answers[key] = answer
    return _answers[key]
