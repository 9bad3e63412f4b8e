"""The parts that an engine can start without, and the settings that disable them.

A part is:

- an op that a plugin's implementation runs
- an operator that a backend replaces outside the plan (FlagGems replaces operators of PyTorch)
- a plugin
- a setting of the user
- a neighbour: another distribution's general plugin for vLLM

A plugin is loaded if it or any of its parts is on, so a trial of one op is a trial of one part.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_fl.errors import VllmFLError
from vllm_fl.settings.schema import CONFIG, Settings
from vllm_fl.settings.values import OP_CONFIG, ORDER_PREFIX, PER_OP

from ._child import surviving
from ._list_parts import listing
from ._other_plugins import VARIABLE, plugins_without
from ._show import UsageError, say

SETTING, PLUGIN, OP, NAME, NEIGHBOUR = "setting", "plugin", "op", "name", "neighbour"

LIKELY = 4
"""Maximum number of parts in a log that are tried first."""


Values = dict[str, str | None]
"""Variable -> its value; None unsets it."""

Content = dict[str, Any]
"""Content of a settings file."""


@dataclass(frozen=True)
class Part:
    """One part.

    Args:
        kind: SETTING, PLUGIN, OP, NAME or NEIGHBOUR.
        name: the setting's key, the plugin's distribution or module, the op, the operator, or the
            neighbour's entry point.
        what: a description.
        of: the plugin that it belongs to.
        order: for an OP, its order without implementations from plugins.
        variable: for a SETTING, its variable.
        setting: for a NAME, the key of the list that can exclude it.
    """

    kind: str
    name: str
    what: str
    of: str | None = None
    order: Sequence[str] = ()
    variable: str = ""
    setting: str = ""

    @property
    def key(self) -> str:
        """The part's name in trials and results, such as `op rms_norm`."""
        return f"{self.setting or self.kind} {self.name}"


@dataclass
class Changes:
    """Changes of the user's settings.

    Args:
        orders: op -> its order.
        values: variable -> (its key in a file, its value). The value None unsets it.
    """

    orders: dict[str, Sequence[str]] = field(default_factory=dict)
    values: dict[str, tuple[str, Any]] = field(default_factory=dict)

    def made(self, environment: Mapping[str, str]) -> tuple[Values, str, Content, Content]:
        """Return the changes for an environment.

        Returns:
            (changed variables, variable of a settings file that overrides such variables or an
            empty string, old content of that file, new content).
        """
        names = (CONFIG, OP_CONFIG) if self.orders else (CONFIG,)
        file = next((name for name in names if environment.get(name, "").strip()), "")
        variables: Values = {}
        before = _read(environment[file], file) if file else {}
        after = dict(before)
        for variable, (key, value) in self.values.items():
            if file == CONFIG and key and value is not None:
                after[key] = value
                continue
            variables[variable] = ",".join(value) if isinstance(value, list) else value
            after.pop(key, None)
        orders = {op: [*order] for op, order in self.orders.items()}
        if file == CONFIG and orders:
            key = ORDER_PREFIX.rstrip(".")
            after[key] = {**(after.get(key) or {}), **orders}
        elif file:
            after |= orders
        elif orders:
            old = environment.get(PER_OP, "").split(";")
            kept = [each for each in old if each.partition("=")[0].strip() not in {*orders, ""}]
            new = [f"{op}={'|'.join(order)}" for op, order in orders.items()]
            variables[PER_OP] = ";".join([*kept, *new])
        return variables, file, before, after

    def applied(self, environment: Mapping[str, str], folder: str) -> dict[str, str]:
        """Return the changed environment; write a changed file to `folder`."""
        variables, file, before, after = self.made(environment)
        if after != before:
            path = Path(folder) / "settings.yaml"
            path.write_text(json.dumps(after), encoding="utf-8")  # JSON is also YAML
            variables[file] = str(path)
        every = {**environment, **variables}
        return {name: value for name, value in every.items() if value is not None}

    def described(self, environment: Mapping[str, str]) -> list[str]:
        """Return the changes as shell commands, and as lines for the user's file."""
        variables, file, before, after = self.made(environment)
        lines = []
        for name, value in variables.items():
            if value is not None:
                lines.append(f"export {name}={shlex.quote(value)}")
            elif name in environment:
                lines.append(f"unset {name}")
        for key in before | after:
            if before.get(key) != after.get(key):
                new = json.dumps(after[key]) if key in after else "(remove it)"
                lines.append(f"{environment[file]}: {key}: {new}")
        return lines


def _read(path: str, variable: str) -> Content:
    import yaml

    try:
        content: Content = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{variable} {path}: cannot be read: {error}") from error
    return content


class Parts:
    """The parts of an engine of this environment, each plugin before its parts.

    `listing` is the result of `_list_parts.listing`.
    """

    def __init__(self, listing: Mapping[str, Any]) -> None:
        self._plugins: Mapping[str, Any] = listing["plugins"]
        self._lists: Mapping[str, Any] = listing["lists"]
        every = [Part(**part) for part in listing["parts"]]
        plugins = [
            Part(PLUGIN, name, f"plugin {about['release']}")
            for name, about in self._plugins.items()
        ]
        ordered = [part for part in every if part.of is None and part.kind != OP]
        for plugin in plugins:
            ordered += [plugin, *(part for part in every if part.of == plugin.name)]
        ordered += [part for part in every if part.of is None and part.kind == OP]
        self.by_key = {part.key: part for part in ordered}
        self.below: dict[str, list[str]] = {}  # plugin -> its parts
        for part in ordered:
            if part.of is not None:
                self.below.setdefault(f"{PLUGIN} {part.of}", []).append(part.key)

    def without(self, on: Iterable[str]) -> frozenset[str]:
        """Return the parts that are disabled if only these parts and their plugins are on."""
        needed = {f"{PLUGIN} {of}" for key in on if (of := self.by_key[key].of) is not None}
        return frozenset(self.by_key) - needed - {*on}

    def changes(self, off: Collection[str]) -> Changes:
        """Return the settings that disable these parts."""
        changes = Changes()
        parts = [part for key, part in self.by_key.items() if key in off]
        unloaded = {part.name for part in parts if part.kind == PLUGIN}
        if gone := [part.name for part in parts if part.kind == NEIGHBOUR]:
            changes.values[VARIABLE] = "", plugins_without(*gone)
        left_out: dict[str, set[str]] = {}
        for part in parts:
            if part.kind == OP:
                changes.orders[part.name] = part.order
            elif part.kind == SETTING:
                changes.values[part.variable] = part.name, None
            elif part.kind == NAME and part.of not in unloaded:
                left_out.setdefault(part.setting, set()).add(part.name)
        for key, names in left_out.items():
            listed, allows = self._lists[key]["names"], self._lists[key]["allows"]
            new = [n for n in listed if n not in names] if allows else [*listed, *sorted(names)]
            changes.values[self._lists[key]["variable"]] = key, new
        for setting, is_module in ((Settings.plugins, False), (Settings.plugin_modules, True)):
            of_kind = [name for name, of in self._plugins.items() if of["module"] is is_module]
            if unloaded & {*of_kind}:
                left = [name for name in of_kind if name not in unloaded]
                changes.values[setting.variable] = "", left
        return changes

    def likely(self, text: str, names: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the parts with names that occur in a failure, and their plugins.

        Args:
            text: the exception, and notes of the processes about their work.
            names: functions and modules of the stacks, innermost first.
        """
        words = [*re.findall(r"[\w.-]+", text), *names]
        first = {word.strip("."): number for number, word in [*enumerate(words)][::-1]}
        found = [
            (min(first[word] for word in said), part.key)
            for part in self.by_key.values()
            if (said := {part.name, part.variable} & first.keys())
        ]
        most = [key for _, key in sorted(found)][:LIKELY]
        plugins = [f"{PLUGIN} {of}" for key in most if (of := self.by_key[key].of) is not None]
        return tuple(dict.fromkeys((*plugins, *most)))


def listed() -> Parts:
    """List the parts of an engine of this environment, in a forked child.

    A plugin that hangs or ends the process that loads it is listed without its parts.

    Raises:
        UsageError: a setting is invalid, vllm-fl is disabled, or the plugins fail to load.
    """
    ended: dict[str, str] = {}
    try:
        found = surviving(listing, ended)
    except VllmFLError as error:
        raise UsageError(error.message, code=error.code) from error
    if not found["enabled"]:
        raise UsageError(f"{Settings.enabled.variable} is set to off, so vllm-fl has no plan")
    for plugin, how in ended.items():
        say(f"vllm-fl: {plugin}: {how}", error=True)
    for remark in found["remarks"]:
        say(f"vllm-fl: {remark}", error=True)
    return Parts(found)
