"""`vllm-fl plugins`: the installed plugins and what became of each."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..dispatch import get_default_manager
from ..plugins import rivals
from ._show import print_json, print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options of its own."""


def run(arguments: argparse.Namespace) -> int:
    """Exit 1 when a plugin failed, or when another distribution owns what is ours."""
    startup = get_default_manager().startup
    assert startup is not None
    rows: list[dict[str, Any]] = [
        {
            "name": plugin.owner.plugin,
            "distribution": plugin.owner.distribution,
            "version": plugin.owner.version,
            "path": plugin.owner.path,
            "status": plugin.status,
            "hooks": list(plugin.hooks),
            "error": str(plugin.error) if plugin.error else None,
        }
        for plugin in startup.plugins
    ]
    others = rivals()
    if arguments.json:
        print_json(plugins=rows, rivals=list(others))
    elif not rows:
        print("No plugin is installed. Try: pip install vllm-fl-reference")
    else:
        print_table(
            ["plugin", "distribution", "version", "status", "hooks", "path"],
            [
                (
                    r["name"],
                    r["distribution"],
                    r["version"],
                    r["status"],
                    ", ".join(r["hooks"]),
                    r["path"],
                )
                for r in rows
            ],
        )
    if not arguments.json:
        for row in rows:
            if row["error"]:
                print(row["error"], file=sys.stderr)
        for other in others:
            print(other, file=sys.stderr)
    return 1 if others or any(row["status"] == "failed" for row in rows) else 0
