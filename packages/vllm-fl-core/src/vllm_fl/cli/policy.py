"""`vllm-fl policy`: every effective setting, where it comes from and what it overrides."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterable
from typing import Any

from ..dispatch import get_default_manager
from ..logs import quiet
from ..settings.policy import OpOrder
from ..settings.schema import CONFIG, Setting, Settings
from ..text import HIDDEN, is_secret
from . import _table
from ._report import ReportFile
from ._settings_file import in_environment, text_of
from ._show import UsageError, print_json, print_table, say


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
        manager = get_default_manager()
        settings = manager.settings
    assert settings is not None
    if arguments.write:
        return _write(settings, arguments)
    rows = as_rows(settings)
    table = _table.as_json(settings, manager.registry.snapshot())
    files = list(settings["platform_files"].value)  # type: ignore[call-overload]
    if arguments.json:
        print_json(
            platform=settings.platform,
            platform_files=files,
            settings=rows,
            table=table,
            unchecked=list(settings.unchecked),
            unowned=list(settings.unowned),
            warnings=list(settings.warnings),
        )
        return 0
    say(f"Platform: {settings.platform} ({settings['platform'].origin})")
    say(f"Platform files: {', '.join(files) or 'none'}")
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
            say(f"{row['key']} is made of the files of several backends:")
            for each in row["merged"]:
                say(f"  {each['origin']}: {_text(each['value'])}")
            for sentence in row["disagreements"]:
                say(f"  They disagree: {sentence}.")
    if table and settings.pinned is not None:
        summary = _table.summary(settings.pinned)
        say(f"{summary}. `vllm-fl doctor` says whether it holds on this machine. Its rows:")
        for op, of_op in table["rows"].items():
            each = ", ".join(f"up to {row['up_to']} tokens {row['impl']}" for row in of_op)
            idle = " (a list of yours orders the op)" * settings.policy.names(op)
            say(f"  {op}: {each or 'none'}{idle}")
    if settings.unowned:
        say("Settings that belong to no loaded plugin: they are kept, unchecked, and do nothing:")
        for name in settings.unowned:
            say(f"  {name}")
    unknown = [name for name in settings.unchecked if name not in settings.unowned]
    if unknown:
        say("Names that nobody here could check, or that nobody installed knows:")
        for name in unknown:
            say(f"  {name}")
    for warning in settings.warnings:
        say(f"Warning: {warning}")
    return 0


def _write(settings: Settings, arguments: argparse.Namespace) -> int:
    """Write the settings, and say what else counts beside the file."""
    text, beside = text_of(settings), in_environment(settings)
    with ReportFile(arguments.write, "--write") as file:
        file.write(text)
    if arguments.json:
        print_json(file=str(file.path), environment=beside)
        return 0
    say(f"{file.path}: use it with {CONFIG}={file.path}")
    for variable in beside:
        say(f"A file cannot hold {variable}: set it beside the file.")
    return 0


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


def _each(key: str, values: Iterable[tuple[object, str]]) -> list[dict[str, Any]]:
    return [{"value": _plain(key, value), "origin": origin} for value, origin in values]


def _plain(key: str, value: object) -> Any:
    if isinstance(value, OpOrder):
        return value.written
    if is_secret(key) and value not in (None, ()):
        return HIDDEN
    return list(value) if isinstance(value, tuple) else value


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
