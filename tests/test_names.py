"""A public name has one meaning in all packages."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import envs

SHARED = {
    "Engine": "the protocol for plugins, and its implementation",
    "BINDING": "the targets of an op: each module of bindings",
    "add_arguments": "each verb of the command",
    "available": "why a backend cannot run: Ascend, FlagGems",
    "implementation": "makes an implementation of a backend: Ascend, CUDA, FlagGems",
    "log": "the logger of each module",
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


def targets(statement: ast.stmt) -> set[str]:
    """Return the variables that a statement of a module assigns."""
    found = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
    names = (node for target in found if target for node in ast.walk(target))
    return {node.id for node in names if isinstance(node, ast.Name)}


def imported() -> set[tuple[str, str]]:
    """Return (module, name) of every import from a module, by the last part of its path."""
    return {
        ((node.module or file.parent.name).rpartition(".")[2], alias.name)
        for file, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def module_name(file: Path) -> str:
    return file.parent.name if file.stem == "__init__" else file.stem


def is_one_interface(files: set[Path]) -> bool:
    """Return whether these are a hook and plugins, or a contract and its implementations."""
    paths = [file.as_posix() for file in files]
    is_hook = any(path.endswith(HOOKS) for path in paths)
    is_op = any(CONTRACTS in path for path in paths)
    return (is_hook and all(path.endswith((HOOKS, "plugin.py")) for path in paths)) or (
        is_op and all(CONTRACTS in path or "/impl/" in path for path in paths)
    )


def test_a_name_has_one_meaning() -> None:
    functions, variables = defaultdict(set), defaultdict(set)
    for file, tree in SOURCES.items():
        for statement in tree.body:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                functions[statement.name].add(file)
            for name in targets(statement):
                variables[name].add(file)
    imports = imported()
    for name, files in variables.items():
        # The other constants are used only in their module.
        if name in functions or any((module_name(file), name) in imports for file in files):
            functions[name] |= files
    functions["log"] = variables["log"]
    several = {name: files for name, files in functions.items() if len(files) > 1}
    found = {n for n, files in several.items() if n[0] != "_" and not is_one_interface(files)}
    new, gone = found - SHARED.keys(), SHARED.keys() - found
    places = {name: sorted(map(str, several[name])) for name in sorted(new)}
    assert not new, f"rename all but one, or add the one meaning to SHARED: {places}"
    assert not gone, f"no longer defined twice, remove from SHARED: {sorted(gone)}"
