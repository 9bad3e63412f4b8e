"""`vllm-fl plugins`: the installed plugins and what became of each."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from ..dispatch import get_default_manager
from ..plugins import Plugin, rivals
from ._show import print_json, print_table, say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options of its own."""


def run(arguments: argparse.Namespace) -> int:
    """Exit 1 when a plugin failed, or when another distribution owns what is ours."""
    manager = get_default_manager()
    manager.ensure_initialized(patient=True)  # what is installed needs no policy
    startup = manager.startup
    assert startup is not None
    rows = as_rows(startup.plugins)
    others = rivals()
    if arguments.json:
        print_json(plugins=rows, rivals=list(others))
    elif not rows:
        say("No plugin is installed. Try: pip install vllm-fl-reference")
    else:
        show(rows)
    if not arguments.json:
        for row in rows:
            if row["error"]:
                say(row["error"], error=True)
        for other in others:
            say(other, error=True)
    return 1 if others or any(row["status"] == "failed" for row in rows) else 0


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
