"""Core contains no op names: facts about an op belong in its contract or binding."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import vllm_fl
from vllm_fl.plugins.registry import known_contracts

ROOT = Path(vllm_fl.__file__).parent
OPS = frozenset(known_contracts().contracts)

EXAMPLE = "an example, in words for a reader"
EXCEPTIONS = {
    ("plugins/types.py", "rms_norm"): EXAMPLE,
    ("integration/patchers/kernel_classes.py", "fused_experts"): "an attribute of a vLLM class",
}
"""(module, op) -> why its name is allowed. Docstrings and comments are not checked."""


def words(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, name or string) of a module, except docstrings."""
    documentation = {
        id(node.value)
        for node in ast.walk(module)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(module):
        for _, value in ast.iter_fields(node):
            if isinstance(value, str) and id(node) not in documentation:
                yield getattr(node, "lineno", 1), value


def named(word: str) -> set[str]:
    """Ops that a name or text contains; in a text, only names with `_`: `linear` is also a word."""
    parts = set(re.findall(r"\w+", word))
    return {op for op in OPS if op == word or (op in parts and "_" in op)}


def test_no_op_is_named_in_core() -> None:
    found = {
        (path, op): line
        for file in sorted(ROOT.rglob("*.py"))
        for path in [file.relative_to(ROOT).as_posix()]
        for line, word in [*words(ast.parse(file.read_bytes())), (1, file.stem)]
        for op in named(word)
    }
    unexplained = {
        f"{path}:{line} names {op}"
        for (path, op), line in found.items()
        if (path, op) not in EXCEPTIONS
    }
    assert unexplained == set(), "make it a field of the op's Binding or OpSpec"
    assert set(EXCEPTIONS) <= set(found), "an exception that nothing needs any more"
