"""Counts lines of code: of each distribution, and of each folder of vllm-fl-core.

    python tools/lines.py                     # of the working tree
    python tools/lines.py v0.2.0              # of a commit
    python tools/lines.py --against v0.2.0    # of both: before, after and the difference
    python tools/lines.py --check             # sizes above the limits in tools/limits.toml

Ignores comments, docstrings, blank lines and tests.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tokenize import COMMENT, DEDENT, ENCODING, ENDMARKER, INDENT, NEWLINE, NL, generate_tokens

import envs

__all__ = ["code_lines", "counted", "sources"]

CORE = "vllm-fl-core"
LIMITS = envs.ROOT / "tools" / "limits.toml"
IDLE = {COMMENT, DEDENT, ENCODING, ENDMARKER, INDENT, NEWLINE, NL}


def code_lines(source: str) -> int:
    texts = {
        (node.lineno, node.col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    blank = {n for n, line in enumerate(source.splitlines(), 1) if not line.strip()}
    lines = {
        line
        for token in generate_tokens(io.StringIO(source).readline)
        if token.type not in IDLE and token.start not in texts
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - blank)


def sources(commit: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path below packages/, source) of all modules of a commit, or of the working tree."""
    if not commit:
        for path in (envs.ROOT / "packages").glob("*/src/**/*.py"):
            yield path.relative_to(envs.ROOT / "packages").as_posix(), path.read_text("utf-8")
        return
    command = ["git", "archive", commit, "packages"]
    done = subprocess.run(command, cwd=envs.ROOT, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise SystemExit(f"`{' '.join(command)}` failed: it needs a commit of this repository")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        for member in archive:
            path = Path(member.name).relative_to("packages")
            if path.suffix == ".py" and "src" in path.parts[1:2] and member.isfile():
                content = archive.extractfile(member)
                assert content is not None
                yield path.as_posix(), content.read().decode()


def counted(found: Iterable[tuple[str, str]]) -> Mapping[str, int]:
    """Distribution, or folder of core as `vllm-fl-core: FOLDER` -> lines of code."""
    counts: Counter[str] = Counter()
    for path, source in found:
        name, _, _, *inside = path.split("/")
        lines = code_lines(source)
        counts[name] += lines
        if name == CORE:
            counts[f"{CORE}: {inside[0] if len(inside) > 1 else '(outside the rooms)'}"] += lines
    return counts


def test_lines() -> int:
    """Lines of all tests' Python files, as `wc -l` counts them."""
    homes = (envs.ROOT / home for home in ("packages", "examples", "tests"))
    files = (path for home in homes for path in home.rglob("*.py"))
    return sum(path.read_text("utf-8").count("\n") for path in files if "tests" in path.parts)


def excesses() -> Iterator[str]:
    """Yield a sentence for each size above its limit in tools/limits.toml."""
    limits = tomllib.loads(LIMITS.read_text())
    found = dict(sources())
    counts = counted(found.items())
    total = sum(lines for name, lines in counts.items() if ":" not in name)
    has = {**counts, "all distributions": total, "all tests": test_lines()}
    for name, limit in limits["lines"].items():
        if has[name] > limit:
            yield f"{name} has {has[name]} lines; its limit is {limit}"
    for path, source in found.items():
        raw = source.count("\n")
        if path.startswith(f"{CORE}/") and raw > limits["module"]:
            yield f"{path} has {raw} lines; the limit for a module of core is {limits['module']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "commit", nargs="?", default="", help="count this commit instead of the working tree"
    )
    parser.add_argument(
        "--against",
        metavar="COMMIT",
        help="also print the counts of that commit and the difference",
    )
    parser.add_argument("--check", action="store_true", help="compare with tools/limits.toml")
    asked = parser.parse_args()
    if asked.check:
        if found := [*excesses()]:
            sys.exit("\n".join((*found, "Remove lines, or raise the limit and give the reason.")))
        return
    now = counted(sources(asked.commit))
    before = counted(sources(asked.against)) if asked.against else now
    for name in sorted({*now, *before}):
        was, has = before.get(name, 0), now.get(name, 0)
        print(f"{name:36} " + (f"{was:7} {has:7} {has - was:+7}" if asked.against else f"{has:7}"))


if __name__ == "__main__":
    main()
