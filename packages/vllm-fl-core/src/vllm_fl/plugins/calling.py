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
    from .finding import Finding

log = get_logger("plugins")

ENDED: dict[str, str] = {}
"""Whose code ended a process of this command before -> how; it is not run again."""


def whose(owner: Owner) -> str:
    """A plugin with its distribution, for notes of what is running."""
    return clean(f"plugin {owner.plugin!r} of {owner.label}")


def leave_out(distribution: str | None) -> str:
    """How to do without a plugin of this distribution.

    Of none is a module that the user named, which no VLLM_FL_PLUGINS leaves out. Extensions cannot
    be left out.
    """
    if may_extend(distribution):
        return "Reinstall it."
    if distribution:
        return "Reinstall it, or leave it out with VLLM_FL_PLUGINS."
    return "Mend it, or take it out of VLLM_FL_PLUGIN_MODULES."


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


def call_hook(
    plugin: Plugin, hook: str, kind: type, consequence: str, **arguments: object
) -> list[Any]:
    """What a plugin's hook returns, without None: at most one value of type `kind`.

    Raises:
        PluginError: it raised anything at all, or returned something else.
    """
    with contained(plugin.owner, f"its {hook} hook", consequence):
        return results_of(plugin, hook, kind, **arguments)


def results_of(plugin: Plugin, hook: str, kind: type, **arguments: object) -> list[Any]:
    """The same, with the errors as the plugin raises them: for a block of `contained`."""
    if plugin.manager is None or hook not in plugin.hooks:
        return []
    results = getattr(plugin.manager.hook, hook)(**arguments)
    for result in results:
        if not isinstance(result, kind):
            raise TypeError(f"{hook} returned {result!r}; expected {kind.__name__} or None")
    return list(results)


def policy_files(
    plugins: Sequence[Plugin], platform: str
) -> tuple[list[tuple[str, Any]], dict[str, PluginError]]:
    """The settings files that plugins ship for `platform`, and the errors of those that failed.

    Returns:
        [(distribution, path)] and {plugin name: its error}.
    """
    kept = "Its implementations are kept, its settings not."
    found, errors = _asked(plugins, "policy", PolicyDefaults, kept, platform=platform)
    files = [(owner.name, defaults.path) for owner, defaults in found]
    return files, {str(error.plugin): error for error in errors}


def _asked(
    plugins: Sequence[Plugin], hook: str, kind: type, consequence: str = "", **arguments: object
) -> tuple[list[tuple[Owner, Any]], list[PluginError]]:
    """What a hook of each plugin returns, with who brings it; and the errors of those that failed.

    Arguments as for `call_hook`. Without a consequence an error says how to leave the plugin out.
    """
    found: list[tuple[Owner, Any]] = []
    errors = []
    for plugin in plugins:
        todo = consequence or leave_out(plugin.owner.distribution)
        try:
            values = call_hook(plugin, hook, kind, todo, **arguments)
        except PluginError as error:
            errors.append(error)
        else:
            found += [(plugin.owner, value) for value in values]
    return found, errors


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
    if asks and not any(plugin.verifies and plugin.manager is not None for plugin in plugins):
        rejected = {impl.impl_id: f"{asks}, and nothing here measures invariance" for impl in impls}
    arguments = {"settings": settings, "op": op, "impls": impls}
    arguments |= {"facts": facts if asks else None, "contract": contract if asks else None}
    for plugin in plugins if settings else ():
        set_here = (settings.get(spec.key) for spec in plugin.settings)
        is_set = any(setting is not None and setting.origin != "default" for setting in set_here)
        if "rejections" in plugin.hooks and (is_set or (asks and plugin.verifies)):
            todo = leave_out(plugin.owner.distribution)
            with contained(plugin.owner, "its rejections hook", todo, named=False):
                for found in results_of(plugin, "rejections", Mapping, **arguments):
                    rejected |= {str(impl_id): clean(str(why)) for impl_id, why in found.items()}
    return rejected


def findings(plugin: Plugin, settings: Any) -> list[Finding]:
    """What a plugin has `vllm-fl doctor` report.

    Raises:
        PluginError: its hook failed.
    """
    from .finding import Finding  # only where it is wanted

    todo = leave_out(plugin.owner.distribution)
    told = call_hook(plugin, "doctor", Iterable, todo, settings=settings)
    with contained(plugin.owner, "its doctor hook", todo):
        return [Finding(**vars(finding)) for found in told for finding in found]


def devices(
    plugins: Sequence[Plugin],
) -> tuple[list[tuple[Owner, DeviceProfile]], list[PluginError]]:
    """The hardware that plugins bring, each with who brings it; and the errors of those that
    failed to say."""
    return _asked(plugins, "device", DeviceProfile)


def start_in_worker(
    plugins: Sequence[Plugin], context: WorkerContext
) -> dict[str, tuple[Plugin, WorkerReport]]:
    """Run the plugins' `worker_start` hooks; distribution -> its plugin and what it reports.

    Raises:
        PluginError: one failed: a half-made set-up must not serve.
        VllmFLError: what a plugin raised of ours, as for a setting that only it can check.
    """
    reports = {}
    for plugin in plugins:
        todo = f"Set what it asks for. {leave_out(plugin.owner.distribution)}"
        with contained(plugin.owner, "its worker_start hook", todo, passing=True):
            found = results_of(plugin, "worker_start", WorkerReport, context=context)
        for report in found:
            with contained(plugin.owner, "its worker_start report", todo, passing=True):
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
