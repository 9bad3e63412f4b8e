"""`vllm-fl plugins`: the installed plugins and what became of each."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from vllm_fl.dispatch import get_default_manager
from vllm_fl.plugins.discovery import unmatched
from vllm_fl.plugins.installed import rivals
from vllm_fl.plugins.plugin import Plugin
from vllm_fl.text import clean

from ._child import surviving
from ._show import answer, print_table, say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options of its own."""


def run(arguments: argparse.Namespace) -> int:
    """Exit 1 when a plugin failed, or was refused an id; when VLLM_FL_PLUGINS matches nothing; or
    when another distribution owns what is ours."""
    found = surviving(_look)
    answer(found, _show, as_json=arguments.json)
    failed = any(row["error"] for row in found["plugins"])
    return 1 if failed or found["rivals"] or found["nothing_matches"] else 0


def _show(facts: Mapping[str, Any]) -> None:
    if facts["plugins"]:
        show(facts["plugins"])
    if not facts["backends"]:
        say("No backend is installed. Try: pip install vllm-fl-reference")
    errors = [row["error"] for row in facts["plugins"] if row["error"]]
    for line in (*errors, *facts["warnings"], *facts["rivals"]):
        say(clean(line), error=True)


def _look() -> dict[str, Any]:
    manager = get_default_manager()
    manager.ensure_initialized(defer_errors=True)  # what is installed needs no policy
    startup = manager.startup
    assert startup is not None
    absent = unmatched([plugin.owner for plugin in startup.plugins], startup.allowed)
    return {
        "plugins": as_rows(startup.plugins),
        "warnings": list(absent),
        "backends": any(plugin.kind == "backend" for plugin in startup.plugins),
        "nothing_matches": bool(absent) and len(absent) == len(startup.allowed or ()),
        "rivals": list(rivals()),
    }


def as_rows(plugins: Iterable[Plugin]) -> list[dict[str, Any]]:
    """Every plugin as JSON data."""
    return [
        {
            "name": plugin.owner.plugin,
            "distribution": plugin.owner.distribution,
            "version": plugin.owner.version,
            "path": plugin.owner.path,
            "status": plugin.status,
            "hooks": list(plugin.hooks),
            "error": str(plugin.error) if plugin.error else None,
        }
        for plugin in plugins
    ]


def show(rows: Iterable[dict[str, Any]]) -> None:
    """The rows as a table."""
    keys = ("name", "distribution", "version", "status")
    print_table(
        ["plugin", "distribution", "version", "status", "hooks", "path"],
        [(*(r[key] for key in keys), ", ".join(r["hooks"]) or None, r["path"]) for r in rows],
    )
