"""The parts that an engine can be started without: what each is called, and how it is left out.

A part is an op that a plugin's implementation runs, one of the operators that a backend replaces
beside the plan (as FlagGems those of PyTorch), a plugin, or a setting that the user set. A plugin
is loaded where it or anything of its own is on, so that a question about one of its ops, or of its
settings, is no question about two parts.
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_fl.plugins.breadcrumb import last
from vllm_fl.settings.schema import CONFIG, Settings
from vllm_fl.settings.values import PER_OP

from ._engines import forget
from ._progress import doing
from ._show import UsageError, say

__all__ = ["NAME", "OP", "PLUGIN", "SETTING", "Part", "Suspects", "listed"]

COMMAND = (sys.executable, "-P", "-m", "vllm_fl_tools.cli._listing")

PATIENCE = 600.0
"""Seconds for all plugins to load, and for their libraries to say what they replace."""

SETTING, PLUGIN, OP, NAME = "setting", "plugin", "op", "name"

LIKELY = 4
"""Parts that a log names are suspected first, but not more than so many."""


@dataclass(frozen=True)
class Part:
    """One part.

    Args:
        key: what it is called in questions and in the state file: `op rms_norm`.
        kind: SETTING, PLUGIN, OP or NAME.
        name: the setting's key, the plugin's distribution or module, the op, or the name.
        what: what it is, for people.
        of: the key of its plugin's part.
        setting: of a NAME, the key of the list of what is left out.
        words: of a SETTING, its variable and its key.
        value: of a SETTING, what it is set to.
    """

    key: str
    kind: str
    name: str
    what: str
    of: str | None = None
    setting: str = ""
    words: tuple[str, ...] = ()
    value: str = ""


class Suspects:
    """All parts of an engine of this environment, those with others beneath them first.

    Args:
        told: what `_listing.listing` says.
        environment: the user's variables.
    """

    def __init__(self, told: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._told, self._environment = told, dict(environment)
        self.parts: dict[str, Part] = {}
        owned = {key for about in told["plugins"].values() for key in about["keys"]}
        self._add_settings(None, lambda key: key not in owned)
        for plugin, about in told["plugins"].items():
            key = self._add(PLUGIN, plugin, f"plugin {about['release']}")
            self._add_settings(key, about["keys"].__contains__)
            for each in told["ops"]:
                if each["plugin"] == plugin:
                    runs = " or ".join(each["impls"])
                    self._add(OP, each["op"], f"{runs} of op {each['op']} ({plugin})", of=key)
            for each in told["lists"]:
                if each["plugin"] == plugin:
                    for name in each["names"]:
                        what = f"{each['what']} {name} ({plugin})"
                        self._add(NAME, name, what, of=key, setting=each["key"])
        for each in told["ops"]:
            if each["plugin"] is None:
                self._add(OP, each["op"], f"the order of op {each['op']}")

    @property
    def environment(self) -> dict[str, str]:
        """What an engine runs on: the device, versions, and the plugins' code."""
        return dict(self._told["environment"])

    def _add_settings(self, of: str | None, is_of: Callable[[str], bool]) -> None:
        for each in filter(lambda each: is_of(each["key"]), self._told["settings"]):
            more = {"words": (each["variable"], each["key"]), "value": each["value"]}
            self._add(SETTING, each["key"], f"setting {each['named']}", of=of, **more)

    def _add(self, kind: str, name: str, what: str, **more: Any) -> str:
        key = f"{more['setting']} {name}" if kind == NAME else f"{kind} {name}"
        self.parts[key] = Part(key, kind, name, what, **more)
        return key

    @cached_property
    def beneath(self) -> dict[str, list[str]]:
        """Plugin -> the parts that go with it."""
        found: dict[str, list[str]] = {}
        for part in self.parts.values():
            if part.of is not None:
                found.setdefault(part.of, []).append(part.key)
        return found

    def whole(self, on: Iterable[str]) -> frozenset[str]:
        """These parts, with the plugins that some of them need."""
        on = frozenset(on)
        return on | {of for key in on if (of := self.parts[key].of) is not None}

    def started_with(self, on: Collection[str]) -> tuple[dict[str, Any], dict[str, str]]:
        """How an engine is started with these parts, and none of the others.

        Args:
            on: keys of parts.

        Returns:
            (what a settings file has, the variables of the engine without the file's).
        """
        on = self.whole(on)
        file: dict[str, Any] = copy.deepcopy(dict(self._told["file"]))
        environment = self._without_covered()
        off = [part for key, part in self.parts.items() if key not in on]
        orders = dict(file.pop("op_backends", {}))
        without = {each["op"]: each["without"] for each in self._told["ops"]}
        for part in off:
            if part.kind == OP:
                orders[part.name] = without[part.name]
        for each in self._told["lists"]:
            left = {part.name for part in off if part.setting == each["key"]}
            if left and each["whitelisted"] is not None:
                listed = [name for name in each["whitelisted"] if name not in left]
                file[each["whitelist"]] = listed
            elif left:
                file[each["key"]] = [*file.get(each["key"], ()), *sorted(left)]
        for each in self._told["settings"]:
            if f"{SETTING} {each['key']}" not in on:
                file.pop(each["key"], None)
                environment.pop(each["variable"], None)
        gone = [part.name for part in off if part.kind == PLUGIN]
        for plugin in gone:
            for key in self._told["plugins"][plugin]["keys"]:
                file.pop(key, None)
        for variable, plugins in self._loading(lambda plugin: plugin not in gone).items():
            is_module = variable == Settings.plugin_modules.variable
            if any(self._told["plugins"][plugin]["module"] is is_module for plugin in gone):
                environment[variable] = plugins
        if orders:
            file["op_backends"] = orders
        return file, environment

    def _without_covered(self) -> dict[str, str]:
        """The user's variables but for those that a settings file overrides."""
        covered = {*self._told["covered"], CONFIG}
        return {name: value for name, value in self._environment.items() if name not in covered}

    def _loading(self, is_loaded: Callable[[str], bool]) -> dict[str, str]:
        """The variables by which these plugins are loaded, and no others."""
        names: dict[bool, list[str]] = {True: [], False: []}
        for plugin, about in self._told["plugins"].items():
            if is_loaded(plugin):
                names[about["module"]].append(plugin)
        return {
            Settings.plugins.variable: ",".join(names[False]),
            Settings.plugin_modules.variable: ",".join(names[True]),
        }

    def beside(self, on: Collection[str]) -> list[str]:
        """What must be set or unset beside the file so that an engine has these parts alone."""
        _, environment = self.started_with(on)
        whole = self.whole(on)
        left = {part.words[0] for part in self.parts.values() if part.kind == SETTING}
        left -= {self.parts[key].words[0] for key in whole if self.parts[key].kind == SETTING}
        told = []
        for name in sorted({*self._without_covered(), *environment, *left}):
            before, now = self._environment.get(name), environment.get(name)
            if now is None and before is not None:
                told.append(f"unset {name}")
            elif now is not None and now != before and (now or before):
                told.append(f"export {name}={now}")
        return told

    def alone(self, parts: Iterable[Part]) -> dict[str, str]:
        """Variables under which these parts are on, and as few others as variables can say."""
        found: dict[str, str] = {}
        orders = []
        plugins: dict[str, None] = {}
        for part in parts:
            if part.kind != SETTING or part.of is not None:
                plugins[part.of or part.key] = None
            if part.kind == OP:
                first = next((e["impls"] for e in self._told["ops"] if e["op"] == part.name), ())
                orders += [f"{part.name}=impl:{first[0]}"] if first else []
            elif part.kind == NAME:
                for each in self._told["lists"]:
                    if each["key"] == part.setting and each["variable"]:
                        listed = [*filter(None, [found.get(each["variable"], ""), part.name])]
                        found[each["variable"]] = ",".join(listed)
            elif part.kind == SETTING:
                found[part.words[0]] = part.value
        names = {self.parts[key].name for key in plugins}
        if names:
            found = self._loading(lambda plugin: plugin in names) | found
        if orders:
            found[PER_OP] = ";".join(orders)
        return {
            name: value
            for name, value in found.items()
            if value or name == Settings.plugins.variable
        }

    def likely(self, text: str, functions: Sequence[tuple[str, str]]) -> tuple[str, ...]:
        """The parts that a failure speaks of, the nearest to it first; their plugins before them.

        Args:
            text: the exception, and what processes noted that they were running.
            functions: (file, function) of the stacks, the innermost first.
        """
        by_name: dict[str, list[str]] = {}
        places: list[tuple[int, str]] = []
        for part in self.parts.values():
            if part.kind in (NAME, OP):
                by_name.setdefault(part.name, []).append(part.key)
            starts = [at.start() for form in _forms(part) if (at := re.search(form, text))]
            places += [(min(starts), part.key)] if starts else []
        found = dict.fromkeys(key for _, key in sorted(places))
        for file, function in functions:
            for name in (function, Path(file).stem):
                found |= dict.fromkeys(by_name.get(name, ()))
        most = [*found][:LIKELY]
        plugins = dict.fromkeys(of for key in most if (of := self.parts[key].of) is not None)
        return tuple(dict.fromkeys((*plugins, *most)))


def _forms(part: Part) -> Iterable[str]:
    """How a text speaks of a part, as patterns."""
    name = re.escape(part.name)
    if part.kind == SETTING:
        return [rf"\b{re.escape(word)}\b" for word in part.words]
    if part.kind == PLUGIN:
        return [rf"\b[Pp]lugin '[^']*' of {name}\b"]
    if part.kind == OP:
        return [rf"\bop '{name}'", rf"\b{name}=[\w.]+"]
    return [rf"\baten::{name}\b", rf"\bby (?:\w+\.)+{name} of "]


def listed(environment: Mapping[str, str]) -> Suspects:
    """Ask what an engine of this environment is made of.

    A plugin that ends the process, or hangs, is a part with nothing beneath it.

    Raises:
        UsageError: a setting is wrong, or there is nothing that a start could be without.
    """
    lenient = dict(environment)
    strict = lenient.pop(Settings.strict_plugins.variable, "")
    ended: list[str] = []
    told = None
    while told is None:
        told, plugin = _asked(lenient, ended)
        if told is None:
            if not plugin or plugin in ended:
                raise UsageError("The plugins cannot be loaded: see `vllm-fl plugins`")
            say(f"vllm-fl: {plugin} ends the process that loads it, or hangs", error=True)
            ended.append(plugin)
    if "problem" in told:
        raise UsageError(told["problem"], code=told["code"])
    if not told["enabled"]:
        raise UsageError(f"{Settings.enabled.variable} is off: vllm-fl changes nothing in a start")
    for remark in told["remarks"]:
        say(f"vllm-fl: {remark}", error=True)
    if strict:  # under it a plugin that fails would have ended the listing, too
        key, variable = Settings.strict_plugins.key, Settings.strict_plugins.variable
        about = {"key": key, "named": f"{variable}={strict}", "variable": variable, "value": strict}
        told["settings"].append(about)
    return Suspects(told, environment)


def _asked(
    environment: Mapping[str, str], ended: Sequence[str]
) -> tuple[dict[str, Any] | None, str]:
    """(what a process says, or None where it ended; the plugin that ran then).

    Args:
        environment: its variables.
        ended: plugins that ended one before; they are not loaded.
    """
    with tempfile.TemporaryDirectory() as folder, doing("the plugins load"):
        file = Path(folder) / "told"
        process = subprocess.Popen(
            [*COMMAND, str(file), *ended],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        told = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    crumb = last(process.pid)
    forget(process.pid)
    whose = "" if crumb is None else crumb.what.partition(" of ")[2]
    return told, whose if whose.startswith("plugin ") else ""
