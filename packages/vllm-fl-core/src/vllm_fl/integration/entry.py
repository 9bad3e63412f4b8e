"""vLLM's two plugin entry points. vLLM calls both in every process, possibly more than once.

vLLM hides what a platform plugin raises and dies of what a general plugin raises; so the first one
says what is wrong, and the second one ends a start that the user's own settings made wrong.
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
    """The platform class for vLLM: its own, or a device's, with our overlay.

    None where we step aside, and where another platform plugin answers: `general_plugin` lays the
    overlay over that one's class.
    """
    try:
        startup = load_startup(os.environ)
        if not startup.enabled:
            return None
        from .compat import obstacle
        from .platform import overlay_path

        problem = obstacle()
        if problem:
            level = logging.WARNING if speaks_for_all() else logging.DEBUG
            log.log(level, "vllm-fl steps aside, vLLM runs as stock: %s [FL510]", problem)
            return None
        return overlay_path(startup.platform)
    except VllmFLError as error:
        log.error("%s", error)  # the general plugin raises it where vLLM cannot swallow it
        return None
    except Exception as error:
        log.exception("vllm-fl steps aside, vLLM runs as stock: %s", quote(error))
        return None


def general_plugin() -> None:
    """Make our variables known to vLLM, and its platform ours where it has taken another plugin's.
    Then extensions are called (`process_start`).

    vLLM comes here in every process, before a configuration is made from arguments.

    No backend is imported here: a worker loads those that its engine's configuration allows, when
    it has that (`planning.load_plugins`). Only a plugin's device is found before, by the
    environment, which an engine's processes inherit.

    Raises:
        SettingsError: a variable that says how to start is wrong.
        PluginError: another distribution owns what is ours; or the platform plugin's error.
        VllmFLError: an extension ends the startup.
    """
    from .compat import hide_our_variables, obstacle

    hide_our_variables()
    startup = load_startup(os.environ)
    if not startup.enabled:
        if speaks_for_all():
            set_log_level(startup.log_level)
            log.info("vllm-fl is off, vLLM is stock: %s (environment)", startup["enabled"].named)
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
