"""A public function or class has a name with one meaning in all packages."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import envs

SHARED = {
    "Engine": "the protocol for plugins, and its implementation",
    "add_arguments": "each verb of the command",
    "available": "why a backend cannot run: Ascend, FlagGems",
    "implementation": "makes an implementation of a backend: Ascend, CUDA, FlagGems",
    "run": "each verb of the command",
    "show": "each verb of the command that prints JSON files",
    "supports_attention": "of a backend: Ascend, FlagGems",
}
"""Names that several modules define, and their one meaning."""

SOURCES = {
    file: ast.parse(file.read_text())
    for file in envs.ROOT.glob("packages/*/src/**/*.py")
    if "templates" not in file.parts
}
HOOKS, CONTRACTS = "plugins/hookspecs.py", "vllm_fl_ops/contracts"


def is_one_interface(files: set[Path]) -> bool:
    """Return whether these are a hook and plugins, or a contract and its implementations."""
    paths = [file.as_posix() for file in files]
    is_hook = any(path.endswith(HOOKS) for path in paths)
    is_op = any(CONTRACTS in path for path in paths)
    return (is_hook and all(path.endswith((HOOKS, "plugin.py")) for path in paths)) or (
        is_op and all(CONTRACTS in path or "/impl/" in path for path in paths)
    )


def test_a_name_has_one_meaning() -> None:
    places = defaultdict(set)
    for file, tree in SOURCES.items():
        for statement in tree.body:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef) and statement.name[0] != "_":
                places[statement.name].add(file)
    found = {n for n, files in places.items() if len(files) > 1 and not is_one_interface(files)}
    new, gone = found - SHARED.keys(), SHARED.keys() - found
    several = {name: sorted(map(str, places[name])) for name in sorted(new)}
    assert not new, f"rename all but one, or add the one meaning to SHARED: {several}"
    assert not gone, f"no longer defined twice, remove from SHARED: {sorted(gone)}"
