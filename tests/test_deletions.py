"""Deleting statements: which there are, and that the list of survivors is held to both ways."""

from __future__ import annotations

import ast
from pathlib import Path

import deletions
import pytest

import envs

SOURCE = '''
"""A module."""
LIMIT = 3

def outer(x):
    """Not a statement to delete."""
    y: int
    x = x + 1
    if x > LIMIT:
        x = x + 1
        return x
    def inner():
        pass
        return 2 * x
    return inner()

class Layer:
    size = 4

    def call(self):
        self.size: int = 5
        raise ValueError
'''
FOUND = {d.key: tree for d, tree in deletions.deletions(SOURCE, "m.py")}


def test_every_statement_of_every_function_is_found_and_nothing_else() -> None:
    assert set(FOUND) == {
        ("m.py", "outer", "x = x + 1"),
        ("m.py", "outer", "x = x + 1 #2"),
        ("m.py", "outer", "if x > LIMIT:"),
        ("m.py", "outer", "return x"),
        ("m.py", "outer", "def inner():"),
        ("m.py", "outer", "return 2 * x"),
        ("m.py", "outer", "return inner()"),
        ("m.py", "Layer.call", "self.size: int = 5"),
        ("m.py", "Layer.call", "raise ValueError"),
    }


@pytest.mark.parametrize(
    ("statement", "five", "one"),
    [
        ("x = x + 1", 6, 2),
        ("x = x + 1 #2", 6, 4),
        ("if x > LIMIT:", 12, 4),
        ("return x", 14, 4),
        ("return 2 * x", 7, None),
        ("return inner()", 7, None),
    ],
)
def test_exactly_that_statement_is_gone(statement: str, five: int, one: int | None) -> None:
    scope: dict[str, object] = {}
    exec(compile(FOUND["m.py", "outer", statement], "m", "exec"), scope)
    outer = scope["outer"]
    assert callable(outer)
    assert (outer(5), outer(1)) == (five, one)


def outcome(*killed: bool) -> dict[deletions.Deletion, bool]:
    return {deletions.Deletion("m.py", "f", f"x = {n}", n): k for n, k in enumerate(killed)}


def test_the_list_of_survivors_is_held_to_both_ways() -> None:
    found = outcome(True, False, True)
    listed = {("m.py", "f", "x = 1"): "why"}
    assert deletions.problems(found, listed, 0.6) == []
    assert "not listed: m.py:1: f: x = 1" in deletions.problems(found, {}, 0.6)[0]
    (problem,) = deletions.problems(found, {**listed, ("m.py", "f", "x = 0"): "why"}, 0.6)
    assert "does not survive: m.py: f: x = 0" in problem
    (problem,) = deletions.problems(found, {**listed, ("m.py", "f", "x = 9"): "why"}, 0.6)
    assert "no such statement: m.py: f: x = 9" in problem
    gpu = {("gpu.py", "f", "x = 9"): "why"}
    assert deletions.problems(found, {**listed, **gpu}, 0.6, {"gpu.py"}) == []
    (problem,) = deletions.problems(found, {**listed, **gpu}, 0.6, {"m"})
    assert "no such statement: gpu.py" in problem
    assert deletions.problems(found, listed, 0.95) == ["2 of 3 noticed; at least 95% must be"]


@pytest.mark.parametrize(
    "text",
    [
        "[[survivor]]\nfile='a'\nfunction='f'\nstatement='pass'\n",
        "[[survivor]]\nfile='a'\nfunction='f'\nstatement='pass'\nreason=''\n",
        "[[survivors]]\n",
        "[[elsewhere]]\nfile='a'\nfunction='f'\nreason='r'\ntests=[]\n",
        2 * "[[survivor]]\nfile='a'\nfunction='f'\nstatement='pass'\nreason='r'\n",
    ],
)
def test_a_list_with_a_mistake_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "survivors.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"survivors\.toml"):
        deletions.read_listed(path)


@pytest.mark.parametrize("path", sorted(envs.ROOT.glob("*/*/tests/survivors.toml")), ids=str)
def test_what_is_listed_is_there(path: Path) -> None:
    """Without running a mutant: a statement that was edited away is named at once."""
    listed = deletions.read_listed(path)
    (impl,) = path.parents[1].glob("src/*/impl")
    known = set()
    for file in impl.glob("*.py"):
        known |= {d.key for d, _ in deletions.deletions(file.read_text(), file.name)}
    assert set(listed.survivors) <= known
    assert set(listed.elsewhere) <= {key[:2] for key in known}


def test_a_deletion_leaves_a_module_that_compiles() -> None:
    for tree in FOUND.values():
        assert isinstance(ast.parse(ast.unparse(tree)), ast.Module)
