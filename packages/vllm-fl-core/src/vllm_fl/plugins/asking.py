"""Call the hooks of an engine, one plugin at a time, and check what each returns.

Errors of core (`VllmFLError`) pass unchanged; any other exception becomes a `PluginError` with the
name of the plugin.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from ..text import clean
from .calling import in_hook, results_of
from .inspection import Check, Engine, GroupFacts, Key, Moment, Objection
from .plugin import Plugin


def asking(plugins: Iterable[Plugin], hook: str) -> list[Plugin]:
    """The loaded plugins that implement `hook`: first in order of loading, verifiers last."""
    asked = [each for each in plugins if each.is_loaded and hook in each.hooks]
    return sorted(asked, key=lambda each: each.verifies)


def objections(plugin: Plugin, engine: Engine, moment: Moment) -> dict[Key, Objection]:
    """The objections of a plugin at this moment (`inspect_plan`)."""
    with in_hook(plugin, "inspect_plan", passing=True):
        found: dict[Key, Objection] = {}
        for each in results_of(plugin, "inspect_plan", Mapping, engine=engine, moment=moment):
            found |= dict(_objection(*item) for item in each.items())
        return found


def _objection(key: Any, told: Any) -> tuple[Key, Objection]:
    """An objection in plain types: ranks exchange it."""
    if not isinstance(told, Objection):
        raise TypeError(f"inspect_plan returned {told!r} for {key!r}; expected Objection")
    op, impl_id = key
    reason = clean(str(told.reason))
    return (str(op), str(impl_id)), Objection(str(told.code), reason, bool(told.ends_strict))


def enter_session(plugin: Plugin, engine: Engine) -> Callable[[], None]:
    """Enter a plugin's `engine_session`.

    Returns:
        What leaves it again.
    """
    held = ExitStack()
    with in_hook(plugin, "engine_session", passing=True):
        for session in results_of(plugin, "engine_session", AbstractContextManager, engine=engine):
            held.enter_context(session)

    def leave() -> None:
        with in_hook(plugin, "engine_session", passing=True):
            held.close()

    return leave


def sections(plugin: Plugin, engine: Engine, taken: Container[str] = ()) -> dict[str, object]:
    """A plugin's keys of the worker's report (`worker_report`).

    Args:
        plugin: the plugin.
        engine: the engine.
        taken: the keys that the report already has; another value for these is an error.
    """
    with in_hook(plugin, "worker_report", named=False, passing=True):
        results = results_of(plugin, "worker_report", Mapping, engine=engine)
        found = {str(key): value for each in results for key, value in each.items()}
        if twice := [key for key in found if key in taken]:
            raise ValueError(
                f"worker_report returned {', '.join(twice)}, which the report already has"
            )
        json.dumps(found)
        return found


def checks(plugin: Plugin, engine: Engine, communicator: Any, group: GroupFacts) -> list[Check]:
    """A plugin's checks of a communicator (`communicator_checks`)."""
    arguments = {"engine": engine, "communicator": communicator, "group": group}
    with in_hook(plugin, "communicator_checks", passing=True):
        results = results_of(plugin, "communicator_checks", Iterable, **arguments)
        found = [check for each in results for check in each]
        for check in found:
            if not isinstance(check, Check):
                raise TypeError(f"communicator_checks returned {check!r}; expected Check")
        return found
