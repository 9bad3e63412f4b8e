"""Draws mutations of core and ops from a seed, and reports the test session that detects each.

    python tools/mutations.py 2026-11-29                              # list the thirty of this seed
    python tools/mutations.py 2026-11-29 tests-core tests-ops engine  # try each, session by session

A mutation changes one operator, one constant or one branch of a module in
packages/vllm-fl-core/src or packages/vllm-fl-ops/src; each kind is drawn equally often. With
sessions, the script writes the change into the working tree, runs `nox -s SESSION -- -x` until a
session fails, and restores the file. The tests of the changed distribution run first, the others in
the given order. Use a clean clone, because the script rejects modified sources.
"""

from __future__ import annotations

import argparse
import ast
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import envs

__all__ = ["Mutation", "candidates", "drawn"]

SOURCES = [envs.ROOT / "packages" / name / "src" for name in ("vllm-fl-core", "vllm-fl-ops")]
KINDS = ("operator", "constant", "branch")

OPERATORS: dict[type, str] = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.And: "or",
    ast.Or: "and",
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}


@dataclass(frozen=True)
class Mutation:
    """One change of one module.

    Args:
        path: the module.
        kind: one of `KINDS`.
        line: line number, from 1.
        start, end: byte range of the file to replace.
        text: the replacement.
    """

    path: Path
    kind: str
    line: int
    start: int
    end: int
    text: str

    def __str__(self) -> str:
        before = self.path.read_bytes()[self.start : self.end].decode()
        where = f"{self.path.relative_to(envs.ROOT)}:{self.line}"
        return f"{where}: {self.kind}: {_short(before)!r} -> {_short(self.text)!r}"

    def applied(self) -> bytes:
        source = self.path.read_bytes()
        return source[: self.start] + self.text.encode() + source[self.end :]


def candidates(path: Path) -> Iterator[Mutation]:
    """Yield all mutations of a module; type annotations and docstrings are not changed."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        first = starts[node.lineno - 1] + node.col_offset
        return first, starts[node.end_lineno - 1] + node.end_col_offset

    def changed(kind: str, node: ast.expr, text: str) -> Mutation:
        return Mutation(path, kind, node.lineno, *span(node), text)

    for node in _code(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            parts = [ast.unparse(node.left), ast.unparse(node.comparators[0])]
            text = OPERATORS[type(node.ops[0])].join(f" {part} " for part in parts).strip()
            yield changed("operator", node, f"({text})")
        elif isinstance(node, ast.BoolOp):
            text = f" {OPERATORS[type(node.op)]} ".join(f"({ast.unparse(v)})" for v in node.values)
            yield changed("operator", node, f"({text})")
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            left, right = ast.unparse(node.left), ast.unparse(node.right)
            yield changed("operator", node, f"(({left}) {OPERATORS[type(node.op)]} ({right}))")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield changed("constant", node, str(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            yield changed("constant", node, str(node.value + 1))
        elif (
            isinstance(node, (ast.If, ast.IfExp, ast.While))
            and (test := ast.unparse(node.test)) != "TYPE_CHECKING"
        ):
            yield changed("branch", node.test, f"(not ({test}))")


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all executed nodes: no annotations and no parts of f-strings."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.JoinedStr) or not isinstance(node, ast.AST):
                continue
            yield node
            yield from _code(node)


def drawn(seed: str, count: int = 30) -> list[Mutation]:
    """Draw equally many mutations of each kind, in an order that depends only on the seed."""
    modules = sorted(path for folder in SOURCES for path in folder.rglob("*.py"))
    every = [each for path in modules for each in candidates(path)]
    order = random.Random(seed)
    chosen = [
        mutation
        for kind in KINDS
        for mutation in order.sample([e for e in every if e.kind == kind], count // len(KINDS))
    ]
    order.shuffle(chosen)
    return chosen


def seen_by(mutation: Mutation, sessions: list[str]) -> str | None:
    """Return the first session that fails under the mutation; None if all pass."""
    before = mutation.path.read_bytes()
    mutation.path.write_bytes(mutation.applied())
    own = "tests-ops" if "vllm-fl-ops" in mutation.path.parts else "tests-core"
    try:
        for session in sorted(sessions, key=lambda session: session != own):
            # mypy and ruff have no option -x.
            more = () if session in ("lint", "typing") else ("--", "-x")
            command = [sys.executable, "-m", "nox", "-s", session, *more]
            done = subprocess.run(
                command, check=False, cwd=envs.ROOT, capture_output=True, text=True
            )
            if done.returncode:
                failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
                return f"{session}: {failed[0] if failed else 'failed'}"
    finally:
        mutation.path.write_bytes(before)
    return None


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:57]}..."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("seed", help="any text, such as the date")
    parser.add_argument(
        "sessions",
        nargs="*",
        help="sessions of noxfile.py that must find a mutation, in this order",
    )
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument(
        "--only", type=int, nargs="*", help="run only the mutations with these numbers, from 1"
    )
    arguments = parser.parse_args()
    dirty = ["git", "diff", "--quiet", "HEAD", "--", *map(str, SOURCES)]
    if arguments.sessions and subprocess.run(dirty, cwd=envs.ROOT, check=False).returncode:
        parser.error("packages/*/src has uncommitted changes: use a clean clone")
    survivors = 0
    for number, mutation in enumerate(drawn(arguments.seed, arguments.count), 1):
        if arguments.only and number not in arguments.only:
            continue
        print(f"{number:3} {mutation}", flush=True)
        if arguments.sessions:
            found = seen_by(mutation, arguments.sessions)
            survivors += found is None
            print(f"    {found or 'SURVIVES'}", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
