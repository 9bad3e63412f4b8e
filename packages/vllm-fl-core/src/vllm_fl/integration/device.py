"""Out-of-tree hardware: the platform that a plugin's device profile brings."""

from __future__ import annotations

from ..dispatch import get_default_manager
from ..dispatch.startup import Startup, try_settings
from ..dispatch.types import DeviceProfile
from ..errors import PluginError
from ..plugins import devices, find_device

__all__ = ["IN_TREE", "adopt_device", "profile_named"]

IN_TREE = ("cpu", "cuda")
"""The platforms that we know of vLLM's own, as settings name them."""


def adopt_device(forced: str | None) -> DeviceProfile | None:
    """The device that a plugin brings to this machine, with the settings of its platform read.

    Args:
        forced: the platform that VLLM_FL_PLATFORM names, or None.

    Raises:
        PluginError: two devices claim the machine, or the forced one is not there.
    """
    manager = get_default_manager()
    manager.ensure_initialized(patient=True)
    startup = manager.startup
    assert startup is not None  # the default manager finds its own plugins
    profile = find_device(startup.plugins, forced)
    if profile is not None and startup.settings.platform != profile.name:
        registry = manager.registry
        settings, problem = try_settings(registry, startup.plugins, platform=profile.name)
        manager.adopt(Startup(startup.plugins, settings, problem), registry)
    return profile


def profile_named(name: str) -> DeviceProfile:
    """The profile of this name.

    Raises:
        PluginError: no loaded plugin brings it, as where a worker lacks the plugin.
    """
    startup = get_default_manager().startup
    for _, profile in devices(startup.plugins if startup else ()):
        if profile.name == name:
            return profile
    raise PluginError(
        f"No loaded plugin brings the device {name!r} on this host; install the same distributions "
        "wherever a process of one engine runs.",
        plugin=name,
    )
