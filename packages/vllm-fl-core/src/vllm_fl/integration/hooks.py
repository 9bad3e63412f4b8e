"""Call the hooks of an engine: what plugins object to, keep a session for, check and report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from ..dispatch import get_default_manager
from ..plugins.calling import call_hook, leave_out
from ..plugins.inspection import Check, GroupFacts, Key, Moment, Objection
from ..plugins.plugin import Plugin
from .engines import Engine


def inspect_plan(engine: Engine, moment: Moment, *, verifies: bool) -> dict[Key, Objection]:
    """Return what plugins object to on this rank; of two objections the first.

    Args:
        engine: the engine.
        moment: when.
        verifies: whether verifiers are asked, or all other plugins.

    Raises:
        PluginError: a plugin failed; VllmFLError: what it raised of ours.
    """
    found: dict[Key, Objection] = {}
    for plugin in _having("inspect_plan"):
        if plugin.verifies is verifies:
            for each in _called(plugin, "inspect_plan", Mapping, engine=engine, moment=moment):
                found = {**each, **found}
    return found


def start_sessions(engine: Engine) -> None:
    """Enter the sessions of plugins, which end with the engine."""
    for plugin in _having("engine_session"):
        for session in _called(plugin, "engine_session", AbstractContextManager, engine=engine):
            engine.enter(session)


def reports(engine: Engine) -> dict[str, Any]:
    """Return what plugins add to the worker's report, by its top-level keys."""
    found: dict[str, Any] = {}
    for plugin in _having("worker_report"):
        for each in _called(plugin, "worker_report", Mapping, engine=engine):
            found |= each
    return found


def communicator_checks(engine: Engine, communicator: Any, group: GroupFacts) -> Iterator[Check]:
    """Yield the checks of a communicator, in the same order on all ranks of its group."""
    for plugin in _having("communicator_checks"):
        given = {"engine": engine, "communicator": communicator, "group": group}
        for checks in _called(plugin, "communicator_checks", Iterable, **given):
            yield from checks


def _having(hook: str) -> list[Plugin]:
    return [each for each in get_default_manager().registry.plugins if hook in each.hooks]


def _called(plugin: Plugin, hook: str, kind: type, **arguments: Any) -> list[Any]:
    return call_hook(plugin, hook, kind, leave_out(plugin.owner.distribution), **arguments)
