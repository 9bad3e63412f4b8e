"""The verbs of the command: one module each, with `add_arguments(parser)` and `run(arguments)`.

The first line of a module's docstring is "`vllm-fl VERB`: SUMMARY."; `vllm-fl --help` prints the
summary.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

VERBS = ("bisect", "doctor", "explain", "new", "plan", "settings", "show", "tune", "verify")


def load(name: str) -> tuple[str, Any]:
    """Import one verb; return (its summary without a full stop, its module)."""
    module = import_module(f"{__package__}.{name}")
    heading = (module.__doc__ or "").partition("\n")[0]
    return heading.removeprefix(f"`vllm-fl {name}`: ").rstrip("."), module
