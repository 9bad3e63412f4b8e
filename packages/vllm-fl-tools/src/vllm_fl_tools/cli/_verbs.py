"""The verbs of the command: one module each, with `add_arguments(parser)` and `run(arguments)`.

The first line of a module's docstring is "`vllm-fl VERB`: SUMMARY.", which `vllm-fl --help` prints.
The last line is "Example: vllm-fl VERB …", which `vllm-fl VERB --help` prints at its end.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

VERBS = ("bisect", "doctor", "explain", "new", "plan", "settings", "show", "tune", "verify")

READING = frozenset({"doctor", "explain", "plan", "settings", "show"})
"""Verbs that only read, and run no kernel in the process of the command."""


def load_verb(name: str) -> tuple[str, str, Any]:
    """Import one verb; return (its summary without a full stop, its example, its module)."""
    module = import_module(f"{__package__}.{name}")
    lines = (module.__doc__ or "").strip().split("\n")  # without docstrings under `python -OO`
    return lines[0].removeprefix(f"`vllm-fl {name}`: ").rstrip("."), lines[-1], module
