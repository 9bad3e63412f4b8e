"""Run each check on the wrong kernels, and print the verdicts.

Exits with 1 if a verdict differs from the corpus or seen.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from . import judging
from .corpus import KINDS, UNUSUAL, Wrong, kernels
from .page import COLUMNS, keep, seen, write
from .verdict import Verdict


def main() -> int:
    parser = argparse.ArgumentParser(prog="wrong_kernels", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="only these kernels or kinds of kernels"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--only",
        action="append",
        choices=("start", "kit", "graph", "engines"),
        help="run only these checks; engines writes the columns live, shadow and served",
    )
    parser.add_argument("--keep", action="store_true", help="write the verdicts into seen.json")
    parser.add_argument("--write", action="store_true", help="only write the tables of docs")
    options = parser.parse_args()
    if options.write:
        write()
        return 0
    names = _chosen(options.names)
    found: dict[str, dict[str, Verdict]] = {name: {} for name in names}
    for name, verdicts in _verdicts(names, options.only):
        found[name] |= verdicts
        if not options.json:
            for column, verdict in verdicts.items():
                mark = "" if _expected(kernels()[name], column, verdict) else "  NOT AS EXPECTED"
                reason = f"{verdict.check} {verdict.reason[:80]}".strip()
                print(f"{name:56}{column:8}{verdict.outcome:8}{reason}{mark}", flush=True)
    if options.keep:
        kept = {n: {c: _said(v) for c, v in by.items()} for n, by in found.items()}
        keep({n: seen().get(n, {}) | {c: s for c, s in by.items() if c not in ("start", "kit")}
              for n, by in kept.items()})  # fmt: skip
    unexpected = [
        f"{name}: {column}"
        for name, by in found.items()
        for column, verdict in by.items()
        if not _expected(kernels()[name], column, verdict)
    ]
    if options.json:
        rows = {n: {c: v._asdict() for c, v in by.items()} for n, by in found.items()}
        print(json.dumps({"unexpected": unexpected, "kernels": rows}, indent=1))
    else:
        for column in COLUMNS:
            outcomes = [by[column].outcome for by in found.values() if column in by]
            print(f"{column}: {outcomes.count('named')} of {len(outcomes)} named")
        print(f"not as expected: {', '.join(unexpected) or 'none'}")
    return 1 if unexpected else 0


def _chosen(words: list[str]) -> list[str]:
    """Names of the kernels with these names or kinds; all kernels by default.

    Raises:
        SystemExit: a word is neither a kernel nor a kind.
    """
    unknown = {*words} - {*kernels(), *KINDS, UNUSUAL}
    if unknown:
        raise SystemExit(f"unknown kernels or kinds: {', '.join(sorted(unknown))}")
    return [name for name, each in kernels().items() if not words or {name, each.kind} & {*words}]


def _verdicts(names: list[str], only: list[str] | None) -> Any:
    """Yield (kernel, column -> verdict)."""
    for column, judge in (
        ("start", judging.at_start),
        ("kit", judging.by_kit),
        ("graph", judging.in_a_graph),
    ):
        for name in names if not only or column in only else ():
            if column != "graph" or judging.is_captured(kernels()[name]):
                yield name, {column: judge(name)}
    if not only or "engines" in only:
        yield from judging.in_engines(names)


def _said(verdict: Verdict) -> str:
    """Return a verdict as in seen.json."""
    if verdict.outcome == "wrong":
        return f"wrong: {verdict.reason}"
    return verdict.outcome


def _expected(wrong: Wrong, column: str, verdict: Verdict) -> bool:
    if column in ("start", "kit"):
        return (verdict.outcome == "named") == bool(getattr(wrong, column))
    # The number of wrong tokens depends on the machine.
    return (
        _said(verdict).partition(":")[0]
        == seen().get(wrong.name, {}).get(column, "").partition(":")[0]
    )


if __name__ == "__main__":
    sys.exit(main())
