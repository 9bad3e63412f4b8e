"""Call the hooks of plugins, and check their results.

Errors state the plugin and its distribution. Exceptions become a `PluginError`, except errors of
core (`VllmFLError`) with `passing`.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import PluginError, VllmFLError
from ..logs import get_logger
from ..text import clean, quote
from .breadcrumb import noting
from .inspection import (
    Check,
    Engine,
    Finding,
    GroupFacts,
    Key,
    Moment,
    Objection,
    WorkerContext,
    WorkerReport,
)
from .plugin import Owner, Plugin
from .setting import PolicyDefaults
from .types import Impl

if TYPE_CHECKING:
    from ..contracts import OpSpec

log = get_logger("plugins")

ENDED: dict[str, str] = {}
"""Plugin (as text) -> how it ended an earlier process of this command. The plugin is not run
again."""


def describe_owner(owner: Owner) -> str:
    return clean(f"plugin {owner.plugin!r} of {owner.label}")


@contextmanager
def contained(
    plugin: Plugin, what: str, todo: str = "", *, named: bool = True, passing: bool = False
) -> Iterator[None]:
    """Run a plugin's code, with a note (`breadcrumb.noting`). Exceptions become a `PluginError`,
    except a KeyboardInterrupt.

    Args:
        what: the part of the code, for the error and the log: `the import`, `its policy hook`.
        todo: the consequence of a failure and what to do; by default how to run without the plugin.
        named: whether to log the code if it is slow.
        passing: whether errors of core (`VllmFLError`) are raised unchanged.
    """
    owner = plugin.owner
    try:
        with noting(f"{what.replace('its', 'the')} of {describe_owner(owner)}", named=named):
            yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        is_own = isinstance(error, PluginError) and error.plugin == owner.plugin
        if is_own or (passing and isinstance(error, VllmFLError)):
            raise
        part = f": {what} failed" if what.startswith("its") else " failed"
        if log.isEnabledFor(logging.DEBUG):  # as text, because the log does not clean exc_info
            log.debug("%s%s:\n%s", owner.who, part, "".join(traceback.format_exception(error)))
        op = getattr(error, "op", None)
        # A StopIteration that caused a RuntimeError is raised by contextlib instead of the latter.
        cause = None if isinstance(error, StopIteration) else error
        raise owner.error(
            f"{part}: {quote(error)}{_line(error, plugin)}. {todo or plugin.todo}",
            op=op if isinstance(op, str) else None,
            cause=error,
        ) from cause


def _line(error: BaseException, plugin: Plugin) -> str:
    """Return ` (at /path/plugin.py:11)` for the innermost line in the plugin's package, or an empty
    text."""
    own = plugin.module.partition(".")[0]
    lines = [
        f"{frame.f_code.co_filename}:{number}"
        for frame, number in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).partition(".")[0] == own
    ]
    if isinstance(error, SyntaxError) and error.filename:  # in a file that was not executed
        lines.append(f"{error.filename}:{error.lineno}")
    return f" (at {clean(lines[-1])})" if lines else ""


def in_hook(
    plugin: Plugin, hook: str, todo: str = "", *, named: bool = True, passing: bool = False
) -> AbstractContextManager[None]:
    """Run a plugin's hook, or code that the hook has returned, in `contained`. A verifier is not
    logged as slow, because it logs each implementation that it runs."""
    named = named and not plugin.verifies
    return contained(plugin, f"its {hook} hook", todo, named=named, passing=passing)


def results_of(plugin: Plugin, hook: str, kind: type, **arguments: object) -> list[Any]:
    """Call a plugin's hook in an `in_hook` block. Returns at most one result, never None. Raises
    TypeError if a result is not a `kind`."""
    if not plugin.is_loaded or hook not in plugin.hooks:
        return []
    results: list[Any] = plugin.hooks[hook](**arguments)
    for result in results:
        if not isinstance(result, kind):
            raise TypeError(f"{hook} returned {result!r}; expected {kind.__name__} or None")
    return results


HookResults = tuple[list[tuple[Owner, Any]], list[PluginError]]
"""The results of a hook by owner, and the errors of plugins that failed."""


def results_of_each(
    plugins: Sequence[Plugin], hook: str, kind: type, todo: str = "", **given: Any
) -> HookResults:
    found: list[tuple[Owner, Any]] = []
    errors = []
    for plugin in plugins:
        try:
            with in_hook(plugin, hook, todo):
                found += [(plugin.owner, each) for each in results_of(plugin, hook, kind, **given)]
        except PluginError as error:
            errors.append(error)
    return found, errors


def policy_files(
    plugins: Sequence[Plugin], platform: str
) -> tuple[list[tuple[str, Any]], list[PluginError]]:
    """Return [(distribution, path)] of the plugins' settings files for `platform`, and errors."""
    kept = "Its implementations are kept, its settings are ignored."
    found, errors = results_of_each(plugins, "policy", PolicyDefaults, kept, platform=platform)
    return [(owner.name, defaults.path) for owner, defaults in found], errors


def plugin_rejections(
    plugins: Sequence[Plugin],
    settings: Any,
    op: str,
    impls: Sequence[Impl],
    facts: Any = None,
    contract: OpSpec | None = None,
) -> dict[str, str]:
    """Return the implementations of `op` that plugins reject: impl id -> the reason.

    Plugins are called if a setting that they declare is set, and verifiers if the engine requires
    batch-invariant implementations. Without a verifier all implementations are then rejected.
    `facts` are the engine's `EngineFacts`; None outside an engine. Raises PluginError if a hook
    failed: it might have rejected an implementation that the user has excluded.
    """
    asks = facts.wants_invariance if facts is not None else ""
    rejected: dict[str, str] = {}
    if asks and not any(plugin.verifies and plugin.is_loaded for plugin in plugins):
        rejected = {impl.impl_id: f"{asks}, but no loaded plugin measures it" for impl in impls}
    arguments = {"settings": settings, "op": op, "impls": impls}
    arguments |= {"facts": facts if asks else None, "contract": contract if asks else None}
    for plugin in plugins if settings else ():
        set_here = (settings.get(spec.key) for spec in plugin.settings)
        is_set = any(setting is not None and setting.origin != "default" for setting in set_here)
        if "rejections" in plugin.hooks and (is_set or (asks and plugin.verifies)):
            with in_hook(plugin, "rejections", named=False):
                for found in results_of(plugin, "rejections", Mapping, **arguments):
                    if not all(isinstance(text, str) for item in found.items() for text in item):
                        raise TypeError(f"rejections returned {found!r}; expected texts")
                    rejected |= {impl_id: clean(why) for impl_id, why in found.items()}
    return rejected


def plugin_findings(plugin: Plugin, settings: Any) -> list[Finding]:
    """Return a plugin's findings for `vllm-fl doctor`. Raises PluginError if its hook fails."""
    with in_hook(plugin, "doctor"):
        results = results_of(plugin, "doctor", Iterable, settings=settings)
        findings = [Finding(**vars(finding)) for found in results for finding in found]
        for text in (text for finding in findings for text in vars(finding).values()):
            if not isinstance(text, str):
                raise TypeError(f"a Finding consists of texts, got {type(text).__name__}")
        return findings


def start_in_worker(
    plugins: Sequence[Plugin], context: WorkerContext
) -> dict[str, tuple[Plugin, WorkerReport]]:
    """Call the plugins' `worker_start` hooks. An engine must not run with an incomplete setup, so a
    hook that fails raises a PluginError; errors of core (`VllmFLError`) are raised unchanged."""
    reports = {}
    for plugin in plugins:
        todo = f"Fix the reported problem. {plugin.todo}"
        with in_hook(plugin, "worker_start", todo, passing=True):
            for report in results_of(plugin, "worker_start", WorkerReport, context=context):
                plain = WorkerReport(tuple(map(str, report.lines)), dict(report.facts))
                reports[plugin.owner.label] = (plugin, plain)
    return reports


def asking(plugins: Iterable[Plugin], hook: str) -> list[Plugin]:
    """Return the loaded plugins that implement `hook`, in order of loading, but verifiers last."""
    asked = [each for each in plugins if each.is_loaded and hook in each.hooks]
    return sorted(asked, key=lambda each: each.verifies)


def objections(plugin: Plugin, engine: Engine, moment: Moment) -> dict[Key, Objection]:
    with in_hook(plugin, "inspect_plan", passing=True):
        found: dict[Key, Objection] = {}
        for each in results_of(plugin, "inspect_plan", Mapping, engine=engine, moment=moment):
            found |= dict(_objection(*item) for item in each.items())
        return found


def _objection(key: Any, objection: Any) -> tuple[Key, Objection]:
    """Convert an objection to plain types, because ranks exchange it."""
    if not isinstance(objection, Objection):
        raise TypeError(f"inspect_plan returned {objection!r} for {key!r}; expected Objection")
    op, impl_id = key
    code, reason = str(objection.code), clean(str(objection.reason))
    return (str(op), str(impl_id)), Objection(code, reason, bool(objection.ends_strict))


def enter_session(plugin: Plugin, engine: Engine) -> Callable[[], None]:
    held = ExitStack()
    with in_hook(plugin, "engine_session", passing=True):
        for session in results_of(plugin, "engine_session", AbstractContextManager, engine=engine):
            held.enter_context(session)

    def leave() -> None:
        with in_hook(plugin, "engine_session", passing=True):
            held.close()

    return leave


def sections(plugin: Plugin, engine: Engine, taken: Container[str] = ()) -> dict[str, object]:
    """Return a plugin's keys of the worker report (`worker_report`). Raises PluginError if the hook
    failed, returned a key that the report already has (`taken`), or returned a value that JSON
    cannot represent."""
    with in_hook(plugin, "worker_report", named=False, passing=True):
        results = results_of(plugin, "worker_report", Mapping, engine=engine)
        found = {str(key): value for each in results for key, value in each.items()}
        if twice := [key for key in found if key in taken]:
            raise ValueError(
                f"worker_report returned {', '.join(twice)}, which the report already contains"
            )
        json.dumps(found)
        return found


def checks(plugin: Plugin, engine: Engine, communicator: Any, group: GroupFacts) -> list[Check]:
    arguments = {"engine": engine, "communicator": communicator, "group": group}
    with in_hook(plugin, "communicator_checks", passing=True):
        results = results_of(plugin, "communicator_checks", Iterable, **arguments)
        found = [check for each in results for check in each]
        for check in found:
            if not isinstance(check, Check):
                raise TypeError(f"communicator_checks returned {check!r}; expected Check")
        return found
