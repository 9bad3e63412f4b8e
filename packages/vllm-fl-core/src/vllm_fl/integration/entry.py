"""vLLM's two plugin entry points. vLLM calls both in every process, possibly more than once.

vLLM hides errors of platform plugins, but an error of a general plugin ends the process. Therefore
`platform_plugin` logs errors, and `general_plugin` raises them.
"""

from __future__ import annotations

import logging
import os

from ..errors import OwnerError, VllmFLError
from ..logs import get_logger, set_log_level, speaks_for_all
from ..plugins.installed import rivals
from ..settings.loading import load_startup
from ..text import quote

log = get_logger("engine")


def platform_plugin() -> str | None:
    """Return the class path of the overlay for vLLM's platform or a plugin's device. Return None if
    vllm-fl is disabled, cannot run or does not know the machine, or if the platform plugin of
    another package answers: `general_plugin` then overlays its class."""
    try:
        startup = load_startup(os.environ)
        if not startup.enabled:
            return None
        from .compat import obstacle
        from .platform import overlay_path

        problem = obstacle()
        if problem:
            level = logging.WARNING if speaks_for_all() else logging.DEBUG
            log.log(level, "vllm-fl is disabled, vLLM runs unmodified: %s [FL510]", problem)
            return None
        return overlay_path(startup.platform)
    except VllmFLError as error:
        log.error("%s", error)
        return None
    except Exception as error:
        log.exception("vllm-fl is disabled, vLLM runs unmodified: %s", quote(error))
        return None


def general_plugin() -> None:
    """Register vllm-fl's variables, overlay vLLM's platform, and run the `process_start` hooks.

    vLLM calls this in every process, before it makes a configuration. It imports no backend except
    the plugin of a device, which is found from the environment. A worker later loads the plugins
    that its engine's configuration allows (`planning.load_plugins`).

    Raises:
        SettingsError: a startup variable is invalid.
        PluginError: another distribution claims vllm-fl's entry points, or `platform_plugin`
            failed.
        VllmFLError: a plugin's `process_start` ended the startup.
    """
    from .compat import hide_our_variables, obstacle

    hide_our_variables()
    startup = load_startup(os.environ)
    if not startup.enabled:
        if speaks_for_all():
            set_log_level(startup.log_level)
            text = "vllm-fl is disabled, vLLM runs unmodified: %s (environment)"
            log.info(text, startup["enabled"].named)
        return
    others = rivals()
    if others:
        raise OwnerError(f"vllm-fl: {others[0]}", plugin="fl", distribution=others[0].split()[0])
    if obstacle():
        return
    from ..dispatch.platforms import broken_platforms
    from .platform import lay_in_place

    for broken in broken_platforms() if speaks_for_all() else ():
        log.warning("%s. vLLM hides this error and runs without the plugin [FL213]", broken)
    lay_in_place(startup.platform)
    from ..dispatch.startup import begin_process

    begin_process()
