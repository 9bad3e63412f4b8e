"""Call plugins' code, so that every error says whose it is: plugin, distribution and version."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..errors import DeviceError, PluginError, VllmFLError
from ..logs import get_logger
from ..text import clean, quote
from .breadcrumb import running
from .finding import Finding
from .plugin import Owner, Plugin
from .reserved import may_extend
from .types import (
    DeviceProfile,
    Impl,
    PolicyDefaults,
    WorkerContext,
    WorkerReport,
)

if TYPE_CHECKING:
    from ..contracts import OpSpec

log = get_logger("plugins")

ENDED: dict[str, str] = {}
"""Whose code ended a process of this command before -> how; it is not run again."""


def whose(owner: Owner) -> str:
    """A plugin with its distribution, for notes of what is running."""
    return clean(f"plugin {owner.plugin!r} of {owner.label}")


def leave_out(owner: Owner) -> str:
    """How to do without a plugin."""
    if may_extend(owner):
        return "Reinstall it."
    if owner.distribution:
        return "Reinstall it, or leave it out with VLLM_FL_PLUGINS."
    return "Fix it, or take it out of VLLM_FL_PLUGIN_MODULES."


class contained:
    """Run a plugin's code: whatever it raises becomes one `PluginError` that says whose it is.

    Only an interrupt is the user's. While the code runs it is noted (`breadcrumb.running`).

    Args:
        owner: whose code runs.
        what: which part of it, for the error and the log: `the import`, `its policy hook`.
        consequence: what follows from a failure and what to do; one or two sentences.
        own: the package of the plugin's modules. The error then says which of their lines failed.
        named: whether a thread watches the code, to name it in the log if it takes long.
        passing: whether errors of core (`VllmFLError`) pass unchanged.
    """

    # No generator: contextlib lets a StopIteration pass that a generator turns into a RuntimeError.
    def __init__(
        self,
        owner: Owner,
        what: str,
        consequence: str,
        own: str = "",
        *,
        named: bool = True,
        passing: bool = False,
    ) -> None:
        self.owner, self.what, self.consequence, self.own = owner, what, consequence, own
        self.passing = passing
        noted = f"{what.replace('its', 'the')} of {whose(owner)}"
        self.running = running(noted, named=named)

    def __enter__(self) -> None:
        self.running.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> Literal[False]:
        self.running.__exit__(None, None, None)
        owner = self.owner
        if error is None or isinstance(error, KeyboardInterrupt):
            return False
        if isinstance(error, PluginError) and error.plugin == owner.plugin:
            return False  # it says whose it is
        if self.passing and isinstance(error, VllmFLError):
            return False
        part = f": {self.what} failed" if self.what.startswith("its") else " failed"
        if log.isEnabledFor(logging.DEBUG):  # as text, which the log cleans, as it does no exc_info
            log.debug("%s%s:\n%s", owner.who, part, "".join(traceback.format_exception(error)))
        said = f"{part}: {quote(error)}{self._where(error)}. {self.consequence}"
        op = getattr(error, "op", None)
        raise owner.error(said, op=op if isinstance(op, str) else None, cause=error) from error

    def _where(self, error: BaseException) -> str:
        """` (at /path/plugin.py:11)`: the innermost line of the plugin's own, or nothing."""
        if not self.own:
            return ""
        lines = [
            f"{frame.f_code.co_filename}:{number}"
            for frame, number in traceback.walk_tb(error.__traceback__)
            if str(frame.f_globals.get("__name__")).partition(".")[0] == self.own
        ]
        if isinstance(error, SyntaxError) and error.filename:  # of a file that has not yet run
            lines.append(f"{error.filename}:{error.lineno}")
        return f" (at {clean(lines[-1])})" if lines else ""


def in_hook(
    plugin: Plugin, hook: str, todo: str = "", *, named: bool = True, passing: bool = False
) -> contained:
    """Contain a plugin's hook, or code that the hook has returned.

    Args:
        plugin: the plugin.
        hook: the hook.
        todo: the consequence of a failure; by default how to do without the plugin.
        named, passing: as for `contained`. A verifier names each implementation that it runs.
    """
    named = named and not plugin.verifies
    what, todo = f"its {hook} hook", todo or leave_out(plugin.owner)
    return contained(plugin.owner, what, todo, named=named, passing=passing)


def results_of(plugin: Plugin, hook: str, kind: type, **arguments: object) -> list[Any]:
    """The results of a plugin's hook without None, at most one; for a block of `in_hook`.

    Raises:
        TypeError: a result is not a `kind`.
    """
    if not plugin.is_loaded or hook not in plugin.hooks:
        return []
    results: list[Any] = plugin.hooks[hook](**arguments)
    for result in results:
        if not isinstance(result, kind):
            raise TypeError(f"{hook} returned {result!r}; expected {kind.__name__} or None")
    return results


Results = tuple[list[tuple[Owner, Any]], list[PluginError]]
"""The results of a hook, each with its plugin's owner, and the errors of plugins that failed."""


def _each(
    plugins: Sequence[Plugin], hook: str, kind: type, todo: str = "", **given: Any
) -> Results:
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
    """The settings files that plugins ship for `platform`, and the errors of plugins that failed.

    Returns:
        [(distribution, path)] and the errors.
    """
    kept = "Its implementations are kept, its settings not."
    found, errors = _each(plugins, "policy", PolicyDefaults, kept, platform=platform)
    return [(owner.name, defaults.path) for owner, defaults in found], errors


def devices(plugins: Sequence[Plugin]) -> Results:
    """The hardware that plugins support, as `DeviceProfile`."""
    return _each(plugins, "device", DeviceProfile)


def rejections(
    plugins: Sequence[Plugin],
    settings: Any,
    op: str,
    impls: Sequence[Impl],
    facts: Any = None,
    contract: OpSpec | None = None,
) -> dict[str, str]:
    """The implementations of `op` that plugins reject: impl id -> the reason.

    Calls plugins that have a setting of theirs set. If the engine requires batch-invariant
    implementations, calls verifiers as well. Without a verifier nothing measures invariance, and
    all implementations are rejected.

    Args:
        plugins: what is loaded.
        settings: the effective settings.
        op: the op.
        impls: its implementations.
        facts: the facts of the engine (`EngineFacts`); None outside an engine.
        contract: the contract of the op.

    Raises:
        PluginError: a plugin failed to say: what the user has ruled out must not run.
    """
    asks = facts.wants_invariance if facts is not None else ""
    rejected: dict[str, str] = {}
    if asks and not any(plugin.verifies and plugin.is_loaded for plugin in plugins):
        rejected = {impl.impl_id: f"{asks}, and nothing here measures invariance" for impl in impls}
    arguments = {"settings": settings, "op": op, "impls": impls}
    arguments |= {"facts": facts if asks else None, "contract": contract if asks else None}
    for plugin in plugins if settings else ():
        set_here = (settings.get(spec.key) for spec in plugin.settings)
        is_set = any(setting is not None and setting.origin != "default" for setting in set_here)
        if "rejections" in plugin.hooks and (is_set or (asks and plugin.verifies)):
            with in_hook(plugin, "rejections", named=False):
                for found in results_of(plugin, "rejections", Mapping, **arguments):
                    rejected |= {str(impl_id): clean(str(why)) for impl_id, why in found.items()}
    return rejected


def findings(plugin: Plugin, settings: Any) -> list[Finding]:
    """A plugin's findings for `vllm-fl doctor`.

    Raises:
        PluginError: its hook failed.
    """
    with in_hook(plugin, "doctor"):
        results = results_of(plugin, "doctor", Iterable, settings=settings)
        return [Finding(**vars(finding)) for found in results for finding in found]


def start_in_worker(
    plugins: Sequence[Plugin], context: WorkerContext
) -> dict[str, tuple[Plugin, WorkerReport]]:
    """Run the plugins' `worker_start` hooks.

    Returns:
        Distribution -> (its plugin, its report).

    Raises:
        PluginError: one failed: a half-made set-up must not serve.
        VllmFLError: a plugin raised an error of core, such as for a setting that only it can check.
    """
    reports = {}
    for plugin in plugins:
        todo = f"Set what it asks for. {leave_out(plugin.owner)}"
        with in_hook(plugin, "worker_start", todo, passing=True):
            for report in results_of(plugin, "worker_start", WorkerReport, context=context):
                plain = WorkerReport(tuple(map(str, report.lines)), dict(report.facts))
                reports[plugin.owner.label] = (plugin, plain)
    return reports


def find_device(plugins: Sequence[Plugin], name: str | None = None) -> DeviceProfile | None:
    """The device that this machine has, or None where no plugin brings one that it has.

    Args:
        plugins: what is loaded.
        name: the platform that the user forced: the device of that name and no other.

    Raises:
        PluginError: several claim the machine; the forced one says that it is not there; or none
            was found and a plugin's device hook failed: the engine would run elsewhere unnoticed.
    """
    known, errors = devices(plugins)
    if name is not None:
        known = [(owner, profile) for owner, profile in known if profile.name == name]
    verdicts = [(owner, profile, profile.detection()) for owner, profile in known]
    found = [(owner, profile) for owner, profile, verdict in verdicts if verdict is True]
    if len(found) > 1:
        names = ", ".join(f"{profile.name!r} of {owner.name}" for owner, profile in found)
        raise DeviceError(
            f"{len(found)} plugins claim this machine's device: {names}. Say which with "
            "VLLM_FL_PLATFORM=<name>, or leave one out with VLLM_FL_PLUGINS.",
            plugin=found[1][0].plugin,
            distribution=found[1][0].distribution,
        )
    if name is not None and verdicts and not found:
        owner, _, why = verdicts[0]
        raise DeviceError(
            f"VLLM_FL_PLATFORM={name} asks for the device of {owner}, which says that it is not "
            f"here: {why}. Unset VLLM_FL_PLATFORM to run on what vLLM finds itself.",
            plugin=owner.plugin,
            distribution=owner.distribution,
        )
    if not found and errors:
        raise errors[0]
    for error in errors:  # another one's device is here, so that this costs itself only
        log.error("%s", error)
    return found[0][1] if found else None
