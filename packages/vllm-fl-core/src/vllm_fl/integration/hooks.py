"""Ask the loaded plugins what an engine needs of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..dispatch import get_default_manager
from ..errors import PluginError
from ..logs import get_logger
from ..plugins.asking import asking, checks, enter_session, objections, sections
from ..plugins.inspection import Check, GroupFacts, Key, Moment, Objection
from ..plugins.plugin import Plugin
from .engines import Engine

log = get_logger("engine")


def inspect_plan(engine: Engine, moment: Moment, *, verifies: bool) -> dict[Key, Objection]:
    """Return what plugins object to on this rank; of two objections to one the first.

    Args:
        engine: the engine.
        moment: when.
        verifies: whether verifiers are asked, or all other plugins.

    Raises:
        VllmFLError: a plugin failed, or raised one itself.
    """
    found: dict[Key, Objection] = {}
    for plugin in _having("inspect_plan"):
        if plugin.verifies is verifies:
            found = {**objections(plugin, engine, moment), **found}
    return found


def has_inspectors() -> bool:
    """Return whether a backend's plugin inspects plans, whatever verification is to do."""
    return any(plugin.kind == "backend" for plugin in _having("inspect_plan"))


def start_sessions(engine: Engine) -> None:
    """Enter the sessions of plugins, which end with the engine."""
    for plugin in _having("engine_session"):
        engine.on_exit(enter_session(plugin, engine))


def reports(engine: Engine, known: dict[str, Any]) -> dict[str, Any]:
    """Return a worker's report with what plugins add to it, by its top-level keys.

    What a plugin fails to report is missing, and logged once for each engine.
    """
    failed = engine.state.setdefault(reports, set())
    for plugin in _having("worker_report"):
        try:
            known = {**known, **sections(plugin, engine, known)}
        except PluginError as error:
            if plugin.owner not in failed:
                log.warning("%s", error)
            failed.add(plugin.owner)
    return known


def communicator_checks(engine: Engine, communicator: Any, group: GroupFacts) -> Iterator[Check]:
    """Yield the checks of a communicator, in the same order on all ranks of its group."""
    for plugin in _having("communicator_checks"):
        yield from checks(plugin, engine, communicator, group)


def _having(hook: str) -> list[Plugin]:
    return asking(get_default_manager().registry.plugins, hook)
