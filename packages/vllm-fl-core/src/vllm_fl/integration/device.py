"""Out-of-tree hardware: the platform that a plugin's device profile brings."""

from __future__ import annotations

import os
from dataclasses import replace

from ..dispatch import get_default_manager
from ..dispatch.startup import try_settings
from ..errors import DeviceError
from ..plugins.breadcrumb import running
from ..plugins.calling import devices, find_device
from ..plugins.installed import ENGINE_GROUPS, identity
from ..plugins.types import DeviceProfile

__all__ = ["IN_TREE", "detect_device", "other_platforms", "profile_named"]

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
        try:
            with running(f"vLLM's platform plugin {entry.name!r} of {entry.value}"):
                answer = entry.load()()
        except KeyboardInterrupt:
            raise
        except BaseException:
            continue
        if answer is not None:
            name = identity(entry.dist)[0] if entry.dist else entry.value
            found.append(
                f"{name} brings a platform of vLLM's too ({entry.name!r}: {answer}), and vLLM "
                f"takes one only. pip uninstall -y {name}, or choose: VLLM_PLUGINS=fl for vllm-fl, "
                f"VLLM_PLUGINS={entry.name} for {name}"
            )
    return tuple(found)
