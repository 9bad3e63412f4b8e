"""`vllm-fl policy`: every effective setting, where it comes from and what it overrides."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from vllm_fl.dispatch import get_default_manager
from vllm_fl.errors import PluginError
from vllm_fl.logs import quiet
from vllm_fl.settings.devices import DeviceOrder
from vllm_fl.settings.policy import MODES, OpOrder
from vllm_fl.settings.schema import CONFIG, Setting, Settings
from vllm_fl.settings.values import ORDER_PREFIX
from vllm_fl.text import HIDDEN, clean, is_secret

from ._engine import any_engines
from ._options import ReportFile
from ._show import UsageError, answer, print_table, say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the settings are written to."""
    parser.add_argument("--write", metavar="FILE", help="write them as a file for VLLM_FL_CONFIG")
    parser.add_argument("--force", action="store_true", help="replace the file that --write names")


def run(arguments: argparse.Namespace) -> int:
    """Exit 2 when a setting is wrong; a warning alone is no finding, `doctor` has those."""
    if arguments.force and not arguments.write:
        raise UsageError("--force is for --write FILE")
    if arguments.write and os.path.lexists(arguments.write) and not arguments.force:
        raise UsageError(f"--write {arguments.write}: exists; --force replaces it")
    with quiet(logging.WARNING):  # the warnings are shown below
        settings = _settings()
    if arguments.write:
        return _write(settings, arguments)
    facts = {
        "platform": settings.platform,
        "platform_files": list(settings["platform_files"].value),  # type: ignore[call-overload]
        "settings": as_rows(settings),
        "table": settings.tuned.reason or settings.tuned.file if settings.tuned else None,
        "unchecked": list(settings.unchecked),
        "unowned": list(settings.unowned),
        "warnings": list(settings.warnings),
    }
    answer(facts, _show, as_json=arguments.json)
    return 0


def _settings() -> Settings:
    """An engine's own: vLLM knows its platform and its layers. Broken plugins are others' matter.

    Raises:
        SettingsError: one is wrong.
    """
    try:
        (engine,) = any_engines(["compiled"])
        return engine.facts.settings
    except PluginError:
        settings = get_default_manager().settings
        assert settings is not None  # the default manager finds its own plugins
        return settings


def _show(facts: Mapping[str, Any]) -> None:
    rows = facts["settings"]
    (platform,) = (row for row in rows if row["key"] == "platform")
    say(f"Platform: {facts['platform']} ({platform['origin']})")
    say(f"Platform files: {', '.join(facts['platform_files']) or 'none'}")
    print_table(
        ["setting", "value", "origin", "overrides"],
        [
            (
                row["key"],
                _text(row["value"]),
                row["origin"],
                "; ".join(f"{_text(o['value'])} ({o['origin']})" for o in row["overrides"]) or None,
            )
            for row in rows
            if row["key"] != "platform_files"
        ],
    )
    for row in rows:
        if "merged" in row:
            say_merged(row["key"], row)
    if facts["table"]:
        say(f"Table: {facts['table']}")
    if facts["unowned"]:
        say("Settings that belong to no loaded plugin: they are kept, unchecked, and do nothing:")
        say("\n".join(f"  {name}" for name in facts["unowned"]))
    if unknown := [name for name in facts["unchecked"] if name not in facts["unowned"]]:
        say("Names that nobody here could check, or that nobody installed knows:")
        say("\n".join(f"  {name}" for name in unknown))
    for warning in facts["warnings"]:
        say(f"Warning: {warning}")


def _write(settings: Settings, arguments: argparse.Namespace) -> int:
    """Write the settings, and say what else counts beside the file."""
    text, beside = text_of(settings), _in_environment(settings)
    with ReportFile(arguments.write, "--write") as file:
        file.write(text)
    facts = {"file": str(file.path), "environment": beside}
    answer(facts, _show_written, as_json=arguments.json)
    return 0


def _show_written(facts: Mapping[str, Any]) -> None:
    say(f"{facts['file']}: use it with {CONFIG}={facts['file']}")
    for variable in facts["environment"]:
        say(f"A file cannot hold {variable}: set it beside the file.")


def text_of(settings: Settings) -> str:
    """YAML of every setting that a file can hold and that is not the default.

    Raises:
        UsageError: a setting that holds here cannot be said by a file of the user's.
    """
    import yaml

    said: dict[str, Any] = {}
    orders: dict[str, Any] = {}
    for key, setting in settings.items():
        spec = settings.declared.get(key)
        if isinstance(setting.value, OpOrder):
            op = key.removeprefix(ORDER_PREFIX)
            orders[op] = _order(setting, setting.value, settings)
        elif spec is not None and spec.in_file and setting.value != spec.default:
            if is_secret(key):
                raise UsageError(f"--write: {key} looks like a secret, which no file is given")
            value = setting.value
            said[key] = list(value) if isinstance(value, tuple) else value
        elif key in settings.unowned and not setting.origin.startswith("environment "):
            raise UsageError(f"--write: no loaded plugin owns {key} ({setting.origin})")
    if settings.table is not None:
        said["table"] = os.path.abspath(settings.table)  # a file's own is relative to its folder
    if orders:
        said["op_backends"] = orders
    if settings.by_device:
        said["devices"] = [*_sections(settings)]
    lines = [
        "# Written by `vllm-fl policy --write`: what held then, wherever it came from.",
        f"# {CONFIG} names this file, which then replaces variables and platform files.",
        "# Settings that are not here have their defaults.",
    ]
    if variables := _in_environment(settings):
        lines += [
            "# A file cannot hold these: set them beside it.",
            *(f"#   {v}" for v in variables),
        ]
    body = yaml.safe_dump(said, sort_keys=False, allow_unicode=True) if said else ""
    return "\n".join([*lines, "", body])


def _in_environment(settings: Settings) -> list[str]:
    """The variables that count beside a file, as `NAME=value`; of a secret the name alone."""
    found = []
    for setting in settings.values():
        spec = settings.declared.get(setting.key)
        variable = setting.origin.removeprefix("environment ")
        if setting.key == Settings.config.key or (spec is not None and spec.in_file):
            continue
        if variable != setting.origin and not isinstance(setting.value, OpOrder):
            found.append(variable if is_secret(variable) else clean(setting.named))
    return found


def _sections(settings: Settings) -> Iterator[dict[str, Any]]:
    """What is said of some devices, as a file has it: a section for each order that may act."""
    for op, orders in settings.by_device.items():
        for each in orders:
            if each.of_table or (settings.is_users(op) and not each.order.pinned):
                continue
            sides = {}
            for mode in filter(each.order.rows, MODES):
                rows = each.over(settings.policy.order(op, mode, engine=True), mode)
                sides[mode] = OpOrder(rows, rows).written
            named = {"capability": each.capability, "name": each.name}
            said = {key: value for key, value in named.items() if value}
            yield {**said, "op_backends": {op: sides}}


def _order(setting: Setting, order: OpOrder, settings: Settings) -> Any:
    """An order as a file has it; a file's lists are the user's, which win over much."""
    op = setting.key.removeprefix(ORDER_PREFIX)
    if not order.pinned and any(each.of_table for each in settings.by_device.get(op, ())):
        raise UsageError(
            f"--write: the table {settings.table} orders {op}, over {setting.origin}; in a file of "
            "yours that list would win over the table"
        )
    return order.written


def as_rows(settings: Settings) -> list[dict[str, Any]]:
    """Every setting as JSON data, with what it replaced, the nearest first.

    One that several platform files set has what each of them says, too, as `merged`.
    """
    return [
        {
            "key": key,
            "value": _plain(key, setting.value),
            "origin": setting.origin,
            "overrides": _each(key, setting.overrides),
            **(merged_from(setting) if setting.merged else {}),
        }
        for key, setting in settings.items()
    ]


def merged_from(setting: Setting) -> dict[str, Any]:
    """What each platform file says of a setting, and where they disagree, as JSON data."""
    return {
        "merged": _each(setting.key, setting.merged),
        "disagreements": list(setting.disagreements),
    }


def say_merged(what: str, told: dict[str, Any]) -> None:
    """The same for people."""
    say(f"{what} is made of the policy files of several backends:")
    for each in told["merged"]:
        say(f"  {each['origin']}: {_text(each['value'])}")
    for sentence in told["disagreements"]:
        say(f"  They disagree: {sentence}.")


def _each(key: str, values: Iterable[tuple[object, str]]) -> list[dict[str, Any]]:
    return [{"value": _plain(key, value), "origin": origin} for value, origin in values]


def _plain(key: str, value: object) -> Any:
    if isinstance(value, OpOrder):
        return value.written
    if is_secret(key) and value not in (None, ()):
        return HIDDEN
    if isinstance(value, tuple):
        return [str(each) if isinstance(each, DeviceOrder) else each for each in value]
    return value


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(
            f"{key}: ({_text(each)})" if isinstance(each, dict) else f"{key}: {_text(each)}"
            for key, each in value.items()
        )
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return "-" if value is None else str(value)
