"""`vllm-fl doctor`: check the installation and the settings, and suggest fixes.

Example: vllm-fl doctor --bundle report.tar.gz
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from functools import partial
from shlex import quote as quoted
from typing import Any

from importlib_metadata import distribution

from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch.manager import OpManager
from vllm_fl.dispatch.platforms import foreign_platform
from vllm_fl.dispatch.startup import Startup, detect_platform, is_foreign, read_settings
from vllm_fl.errors import DuplicateError, PluginError, SettingsError, VllmFLError
from vllm_fl.logs import quiet
from vllm_fl.plugins import breadcrumb, calling
from vllm_fl.plugins import loading as plugin_loader
from vllm_fl.plugins.breadcrumb import Crumb
from vllm_fl.plugins.calling import policy_files
from vllm_fl.plugins.device import devices, find_device
from vllm_fl.plugins.discovery import discover
from vllm_fl.plugins.inspection import Finding
from vllm_fl.plugins.installed import CORE, canonical, installed_version, required_by
from vllm_fl.plugins.plugin import Owner, Plugin
from vllm_fl.plugins.registry import OpRegistry
from vllm_fl.plugins.reserved import FL_OPS
from vllm_fl.plugins.snapshot import EMPTY
from vllm_fl.settings.loading import load_startup
from vllm_fl.settings.policy import UNTOUCHED
from vllm_fl.settings.schema import CONFIG, RESERVED_NAMES, Settings, undo
from vllm_fl.settings.values import IN_TREE, OP_CONFIG
from vllm_fl.text import clean, quote
from vllm_fl_verify.verdicts import verdict_summary

from ..operate.identity import device_name
from . import _bundle
from ._checks import (
    CODES,
    FAILED_CHECK,
    INSTALL_CHECKS,
    Defect,
    exported,
    find_idle,
    open_to_all,
    repair,
    warned,
)
from ._child import LoadingError, surviving
from ._engine import NOT_INSTALLED, asked_of, check_words, takes_engine
from ._environment import describe_environment, start_probe, torch_facts
from ._options import device_of
from ._other_plugins import VARIABLE
from ._progress import progress
from ._show import print_answer, print_table, say

_CODE = re.compile(r"\[(FL\d{3})\]")

_WITHOUT = re.compile(rf"export {VARIABLE}=\S*[^\s.]")
"""The command that excludes a plugin of vLLM, in an error from `_other_plugins`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    takes_engine(parser)
    parser.add_argument(
        "--bundle",
        metavar="FILE",
        help="write a .tar.gz for a bug report, without secrets: this output, versions, settings, "
        "plan, and reports of engines",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run all checks, also in a broken environment. Return 1 with findings."""
    check_words(arguments)
    with ExitStack() as stack:
        draft = arguments.bundle and stack.enter_context(_bundle.archive_of(arguments.bundle))
        found = _examine(arguments)
        if draft:
            with progress(arguments.verb):
                _bundle.write(draft, found, arguments.model, arguments.more)
    print_answer(found, _show, as_json=arguments.json)
    return 1 if found["findings"] else 0


def _examine(arguments: argparse.Namespace) -> dict[str, Any]:
    findings = [_lost_finding(crumb) for crumb in breadcrumb.lost()]
    ended: dict[str, str] = {}
    try:
        try:
            found = surviving(partial(_look, arguments), ended)
        except LoadingError as error:  # importing vLLM may end the process: repeat without it
            found = surviving(_look, ended)
            found["findings"].append(vars(_ending(str(error))))
    except VllmFLError as error:
        found = {"facts": describe_environment(), "plugins": [], "unchecked": [], "findings": []}
        findings.append(
            Finding("plugins", "The checks did not complete.", str(error), "vllm-fl doctor")
        )
    findings += [Finding(**each) for each in found["findings"]]
    found["findings"] = [
        {"code": error_code(each), **vars(each)} for each in dict.fromkeys(findings)
    ]
    return found


def _show(facts: Mapping[str, Any]) -> None:
    print_table(["what", "found"], facts["facts"].items())
    if facts["unchecked"]:
        say("\nUnrecognized names in settings:")
        say("\n".join(f"  {clean(name)}" for name in facts["unchecked"]))
    findings = facts["findings"]
    say(f"\n{len(findings)} finding{'s' * (len(findings) != 1)}" + ":" * bool(findings))
    for number, finding in enumerate(findings, 1):
        what, why, todo = (clean(finding[key]) for key in ("what", "why", "todo"))
        code = finding["code"]
        if code is not None and f"[{code}]" not in what:
            what = f"{what} [{code}]"
        say(f"\n{number}. {what}\n   Why: {why}\n   Do:  {todo}")
    if any(finding["code"] for finding in findings):
        say("\n`vllm-fl explain CODE` prints the meaning and the fix of each code.")
    if facts["plugins"]:
        say()
        keys = ("name", "distribution", "version", "status", "hooks", "path")
        rows = [{**row, "hooks": ", ".join(row["hooks"]) or None} for row in facts["plugins"]]
        print_table(["plugin", *keys[1:]], [[row[key] for key in keys] for row in rows])


def _look(arguments: argparse.Namespace | None = None) -> dict[str, Any]:
    """Run the checks that call plugins, and checks of the engine that `arguments` describe."""
    examined = _Examined()
    with suppress(OSError):  # the checks that need it report it
        start_probe()
    with quiet(logging.CRITICAL), redirect_stdout(sys.stderr):  # plugins may print when loaded
        loaded = run_check("plugins", examined.load_plugins)  # during the probe
        findings = [each for check in INSTALL_CHECKS for each in run_check(*check)] + loaded
        findings += [each for check in examined.checks for each in run_check(*check)]
        if arguments is not None and examined.settings is not None:  # otherwise already reported
            findings += filter(_is_new, _of_engine(arguments, examined, examined.settings))
    facts = describe_environment(
        {name for plugin in examined.plugins for name in plugin.owner.kernels}
    )
    for owner, why in examined.unused.items():
        name = owner.distribution or owner.plugin
        facts[name] = ", ".join([*filter(None, [facts.get(name)]), why])
    facts["kept verdicts"] = verdict_summary()
    if examined.settings is not None and not examined.settings.enabled:
        facts["vllm-fl"] = f"switched off by {Settings.enabled.variable}"
    if examined.device is not None or examined.absent:
        facts["device of a plugin"] = examined.device or "; ".join(examined.absent)
    if (foreign := foreign_platform()) is not None:
        facts["vLLM's platform"] = f"{foreign.name}, of {foreign.release}"
    if examined.settings is not None and examined.settings.tuned is not None:
        facts["table"] = examined.settings.tuned.file
    return {
        "facts": facts,
        "plugins": [
            {
                "name": plugin.owner.plugin,
                "distribution": plugin.owner.distribution,
                "version": plugin.owner.version,
                "path": plugin.owner.path,
                "status": plugin.status,
                "hooks": list(plugin.hooks),
                "error": str(plugin.error) if plugin.error else None,
            }
            for plugin in examined.plugins
        ],
        "unchecked": list(examined.settings.unchecked) if examined.settings else [],
        "findings": [vars(finding) for finding in findings],
    }


def _of_engine(
    arguments: argparse.Namespace, examined: _Examined, settings: Settings
) -> list[Finding]:
    """Return the findings of an engine's startup before verification, and its warnings.

    It uses the plugins that are loaded already. If one failed, it loads all again.
    """
    failed = [*examined.failing, *(each.error for each in examined.plugins if each.error)]
    if not failed:
        of = settings.plugins, settings.plugin_modules
        startup = Startup(examined.plugins, settings, None, *of)
        get_default_manager().use_startup(startup, examined.registry)
    try:
        engines = asked_of(arguments)
    except VllmFLError as error:
        return [_ending(str(error))]
    first, *_ = engines
    ends = dict.fromkeys(f"{why}." for engine in engines for why in engine.ends)
    if first.unasked not in ("", NOT_INSTALLED):
        ends[f"{first.unasked}."] = None
    found = [_ending(why) for why in ends]
    for why in dict.fromkeys("; ".join(each.differs) for each in engines if each.differs):
        what = f"The engine differs from the lock file of {first.facts.settings['lock'].named}."
        found.append(Finding("lock", what, f"{why}.", _page_of(why, "FL505")))
    warnings = warned(first.facts.settings, os.environ)
    return [*found, *(Finding("settings", *each) for each in warnings)]


def _is_new(finding: Finding) -> bool:
    """Return False if `_checks.companions` has reported the cause of this finding."""
    errors = map(clean, torch_facts().get("broken", {}).values())
    return not any((error.partition(": ")[2] or error) in finding.why for error in errors)


def _ending(why: str) -> Finding:
    without = _WITHOUT.search(why)
    todo = without[0] if without else _page_of(why, "FL514")
    return Finding("engine", "The engine does not start here.", why, todo)


def _page_of(error: str, code: str) -> str:
    """Return the command that explains an error: by the code at its end, or else by `code`."""
    found = _CODE.search(error)
    return f"vllm-fl explain {found[1] if found else code}"


def error_code(finding: Finding) -> str | None:
    """Return the code of a finding's error or check; None for a plugin's check."""
    found = _CODE.search(finding.what)
    return found[1] if found else CODES.get(finding.check)


def run_check(check: str, find: Callable[[], Iterable[Finding | Defect]]) -> list[Finding]:
    """Return the findings of one check. An exception in it is a finding."""
    findings = []
    try:
        for found in find():
            findings.append(found if isinstance(found, Finding) else Finding(check, *found))
    # doctor must also work if metadata, drivers or packages are broken in any way.
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        what = f"The check {check!r} failed. [{FAILED_CHECK}]"
        findings.append(Finding(check, what, quote(error), f"vllm-fl explain {FAILED_CHECK}"))
    return findings


class _Examined:
    """The startup of a process, in steps that may fail independently."""

    def __init__(self) -> None:
        self.registry = OpRegistry(EMPTY)
        self.found: tuple[Plugin, ...] = ()
        self.plugins: tuple[Plugin, ...] = ()
        self.settings: Settings | None = None
        self.forced: str | None = None
        self.device: str | None = None
        self.failing: list[PluginError] = []
        self.absent: list[str] = []
        self.unused: dict[Owner, str] = {}
        self.checks: Sequence[tuple[str, Callable[[], Iterable[Finding | Defect]]]] = (
            ("contracts", self.find_contracts),
            ("device", self.find_device),
            ("settings", self.read_settings),
            ("settings", self.find_idle),
            ("table", self.find_table),
            ("ops", self.find_idle_ops),
            ("plugins", self.ask_plugins),
        )

    def load_plugins(self) -> Iterator[Finding | Defect]:
        """Load every plugin; a failure is a finding."""
        try:
            early = load_startup(os.environ)
            modules, only, self.forced = early.plugin_modules, early.plugins, early.platform
        except SettingsError:  # a later check reports it; nothing is imported until then
            modules, only = (), ()
        self.found = found = discover(modules)
        self.plugins = plugin_loader.load(self.registry, found, only=only, variables=RESERVED_NAMES)
        for plugin in self.plugins:
            if plugin.error is not None:
                yield _plugin_finding(plugin.owner.plugin, plugin.error)
        if not any(each.kind == "backend" for each in found):
            yield (
                "No backend is installed.",
                "vllm-fl-core contains no kernels. Your hardware's vendor may have a backend.",
                "pip install vllm-fl-reference",
            )

    def find_contracts(self) -> Iterator[Finding | Defect]:
        """Find missing contracts, and backends that do not require their contracts."""
        if not any(each.owner.is_of(FL_OPS) for each in self.found):
            yield (
                f"{FL_OPS} is not installed.",
                "It has the contracts of the ops. Without it, vLLM runs unmodified, and fails to "
                "start if a backend implements these ops.",
                f"pip install {FL_OPS}",
            )
        names = {canonical(f.owner.distribution) for f in self.found if f.owner.distribution}
        requires = {name: required_by(distribution(name)) for name in names}
        snapshot = self.registry.snapshot()
        ours = {op for op, author in snapshot.authors.items() if author.is_of(FL_OPS)}
        owners = snapshot.owners.items()
        for owner in dict.fromkeys(owner for (op, _), owner in owners if op in ours):
            if owner.distribution is None:
                continue
            needed = [canonical(owner.distribution)]
            for name in needed:  # grows during the iteration
                others = requires.get(name, frozenset()) - {*needed, CORE}
                needed += sorted(others)
            if FL_OPS not in needed:
                yield (
                    f"{owner.name} implements ops of {FL_OPS}, but does not require it.",
                    f"Without {FL_OPS}, no engine starts with this backend. Its author should add "
                    "the dependency.",
                    f"pip install {FL_OPS}",
                )

    def find_device(self) -> Iterator[Finding | Defect]:
        """Find the device that a plugin provides on this machine; a conflict is a finding."""
        if self.forced in IN_TREE or (self.forced and is_foreign(self.forced)):
            return
        known, self.failing = devices(self.plugins)
        try:
            profile = find_device(self.plugins, self.forced)
        except PluginError as error:
            yield (
                "The device of a plugin cannot be used.",
                f"{error} vLLM does not start on that device.",
                _page_of(str(error), "FL215"),
            )
            return
        self.device = profile.name if profile is not None else None
        if profile is None:
            self.absent = [f"not {each.name}: {each.detection()}" for _, each in known]

    def read_settings(self) -> Iterator[Finding | Defect]:
        """Read the settings; an invalid setting is a finding, and so is each warning."""
        try:
            forced = load_startup(os.environ).platform
            where = forced or detect_platform(self.plugins)
            files, errors = policy_files(self.plugins, where)
            paths = [os.environ.get(name) for name in (CONFIG, OP_CONFIG, Settings.table.variable)]
            yield from open_to_all([*filter(None, paths), *(str(path) for _, path in files)])
            for failure in errors:
                yield _plugin_finding(str(failure.plugin), failure)
            self.settings = read_settings(self.registry, platform=where)
        except SettingsError as error:
            yield (
                str(error),
                "An engine does not start with an invalid setting.",
                repair(str(error), undo(error.origin)),
            )
            return
        yield from warned(self.settings, os.environ)

    def find_idle(self) -> Iterator[Finding | Defect]:
        """Find settings without effect, and unknown names."""
        if self.settings is None:
            return
        yield from find_idle(self.settings, self.plugins)

    def find_table(self) -> Iterator[Finding | Defect]:
        """Find a tuning table that does not apply to this machine."""
        table = self.settings.tuned if self.settings is not None else None
        if table is None or self.settings is None:
            return
        if why := table.differs(device_name(device_of(None)), installed_version):
            what = f"The tuning table {table.file} is ignored here."
            todo = self.settings["table"].undo
            yield what, f"{why}. Run `vllm-fl tune` again.", todo

    def find_idle_ops(self) -> Iterator[Finding | Defect]:
        """Find ops with an available implementation that the settings reject.

        Missing hardware is only noted, because an image for several machines has backends for each.
        """
        if self.settings is None or not any(p.status == "ok" for p in self.plugins):
            return
        manager = OpManager()
        manager.use_startup(Startup(self.plugins, self.settings), self.registry)
        snapshot = self.registry.snapshot()
        reasons = defaultdict[Owner, dict[Any, None]](dict)
        for op, impls in snapshot.impls_by_op.items():
            for impl in impls:
                reasons[snapshot.owners[op, impl.impl_id]][impl.availability()] = None
        for owner, whys in reasons.items():
            if lacks := "; ".join(why for why in whys if why is not True):
                self.unused[owner] = f"{'some ops ' * (True in whys)}not used here: {lacks}"
        for op in snapshot.contracts:
            if all(i.availability() is not True for i in snapshot.impls_by_op.get(op, ())):
                continue
            trace = manager.trace(op, without_layer=True)
            leaves = any(token.kind in UNTOUCHED for token in trace.order)
            if trace.selected is None and not leaves:
                yield (
                    f"{op} has no implementation that can run.",
                    "; ".join(f"{i}: {r}" for i, r in trace.rejected)
                    + ". Inside vLLM, vLLM's implementation runs.",
                    f"vllm-fl explain {op} --script",
                )

    def ask_plugins(self) -> Iterator[Finding | Defect]:
        """Yield the findings that plugins report; a plugin's failure to report is a finding."""
        for plugin in self.plugins if self.settings is not None else ():
            try:
                yield from calling.plugin_findings(plugin, self.settings)
            except PluginError as error:
                yield _plugin_finding(plugin.owner.plugin, error)


def _lost_finding(crumb: Crumb) -> Finding:
    why = (
        "It ended itself (os._exit, an abort, a crash of native code) or was killed (for example, "
        "out of memory), without an error message."
    )
    again = "reinstall it, or exclude it with VLLM_FL_PLUGINS or VLLM_FL_PLUGIN_MODULES"
    if "vLLM" in crumb.what:  # vLLM called the plugin
        again = "reinstall it, or exclude it with VLLM_PLUGINS"
    why = f"{why} If it happens again, {again}. To remove this finding:"
    return Finding("ended", f"An earlier {crumb}.", why, f"rm {quoted(str(crumb.file))}")


def _plugin_finding(name: str, error: PluginError) -> Finding:
    release = error.distribution or ""
    todo = f"pip install --force-reinstall --no-deps {release.replace(' ', '==')}"
    if isinstance(error, DuplicateError):
        todo = f"pip uninstall -y {release.partition(' ')[0]}"
    if not release:  # the plugin's name is its module
        modules = map(str.strip, os.environ.get(Settings.plugin_modules.variable, "").split(","))
        rest = [each for each in modules if each and each.partition(":")[0] != name]
        todo = exported(Settings.plugin_modules.variable, ",".join(rest))
    return Finding("plugins", f"The plugin {name!r} failed.", str(error), todo)
