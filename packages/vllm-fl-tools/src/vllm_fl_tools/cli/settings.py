"""`vllm-fl settings`: show every effective setting, its origin and what it overrides.

Example: vllm-fl settings --json
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from vllm_fl.dispatch import get_default_manager
from vllm_fl.errors import PluginError
from vllm_fl.logs import quiet
from vllm_fl.settings.devices import DeviceOrder
from vllm_fl.settings.policy import OpOrder
from vllm_fl.settings.schema import Settings
from vllm_fl.text import REDACTED, is_secret

from ._engine import any_engines
from ._show import print_answer, print_table, say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no options."""


def run(arguments: argparse.Namespace) -> int:
    """Print the settings. Warnings do not change the exit status; `doctor` has them as findings."""
    with quiet(logging.WARNING):  # `_show` prints the warnings
        settings = _settings()
    facts = {
        "platform": settings.platform,
        "platform_files": list(settings["platform_files"].value),  # type: ignore[call-overload]
        "settings": as_rows(settings),
        "table": settings.tuned.reason or settings.tuned.file if settings.tuned else None,
        "unchecked": [name for name in settings.unchecked if name not in settings.unowned],
        "unowned": list(settings.unowned),
        "warnings": list(settings.warnings),
    }
    print_answer(facts, _show, as_json=arguments.json)
    return 0


def _settings() -> Settings:
    """Return an engine's settings. Broken plugins are ignored.

    Importing vLLM takes seconds, so it is imported only if a setting names its layers.

    Raises:
        SettingsError: a setting is invalid.
    """
    with suppress(ImportError):
        import torch  # noqa: F401 - shows the device, if there is one
    startup = get_default_manager().startup
    assert startup is not None  # the default manager always loads settings
    if startup.problem is not None:
        raise startup.problem
    settings = startup.settings
    if settings.oot_whitelist or settings.oot_blacklist:
        with suppress(PluginError):
            (engine,) = any_engines(["compiled"])
            return engine.facts.settings
    return settings


def _show(facts: Mapping[str, Any]) -> None:
    rows = facts["settings"]
    for warning in facts["warnings"]:  # first: the table is long
        say(f"Warning: {warning}")
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
    if facts["table"]:
        say(f"Tuning table: {facts['table']}")
    for title, names in (
        ("Ignored settings, because their plugin is not loaded", facts["unowned"]),
        ("Names that no installed distribution provides", facts["unchecked"]),
    ):
        if names:
            say("\n  ".join([f"{title}:", *names]))


def as_rows(settings: Settings) -> list[dict[str, Any]]:
    """Return every setting as JSON data, with the replaced or merged values."""
    return [
        {
            "key": key,
            "value": _plain(key, setting.value),
            "origin": setting.origin,
            "overrides": [
                {"value": _plain(key, value), "origin": origin}
                for value, origin in setting.overrides
            ],
        }
        for key, setting in settings.items()
    ]


def _plain(key: str, value: object) -> Any:
    if isinstance(value, OpOrder):
        return value.written
    if is_secret(key) and value not in (None, ()):
        return REDACTED
    if isinstance(value, tuple):
        return [str(each) if isinstance(each, DeviceOrder) else each for each in value]
    return value


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, dict | bool):
        return json.dumps(value)
    return "-" if value is None else str(value)
