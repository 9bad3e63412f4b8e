"""Check that the English of the repository stays as plain as it is.

    python tools/plain.py            # lines that are not allowed, and files with more matches
    python tools/plain.py --write    # record fewer matches in tools/plain.txt
    python tools/plain.py --show FILE…

Lines of tracked .py and .md files that match `NEVER` are errors. `tools/plain.rx` has expressions
with false hits, one per line. The number of their matching lines per file may only fall. Rewrite
for a reader, not for an expression: a line that reads well may stay.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import envs

ROOT = envs.ROOT
RECORDED = ROOT / "tools" / "plain.txt"

NEVER = (
    r"\b(anew|amiss|whoever|nobody|mend(s|ed)?)\b|\bin its stead\b"
    r"|\b(is|are|was|were) told (by|of|apart|to|what|which)\b"
)

OURS = ("tools/plain.py", "tools/plain.rx")


def grep(*arguments: str) -> list[str]:
    """Return what `grep` prints for the tracked .py and .md files."""
    listed = ["git", "ls-files", "*.py", "*.md", *(f":!{name}" for name in OURS)]
    files = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    command = ["grep", "-HE", *arguments, *files.splitlines()]
    found = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    return found.stdout.splitlines()


def main() -> int:
    """Return 1 if a line is not allowed or a file has more matching lines than recorded."""
    parser = argparse.ArgumentParser(prog="tools/plain.py", description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--show", nargs="+", metavar="FILE", default=[])
    options = parser.parse_args()
    every = ("-f", "tools/plain.rx")
    if options.show:
        return subprocess.run(
            ["grep", "-nHE", *every, *options.show], cwd=ROOT, check=False
        ).returncode
    found = {
        name: int(count) for name, count in (line.rsplit(":", 1) for line in grep("-c", *every))
    }
    if options.write:
        lines = (f"{count} {name}\n" for name, count in sorted(found.items()) if count)
        RECORDED.write_text("".join(lines))
    recorded = {
        name: int(count)
        for count, name in (line.split(" ", 1) for line in RECORDED.read_text().splitlines())
    }
    problems = grep("-n", "-i", "-e", NEVER)
    problems += [
        f"{name}: {count} lines match tools/plain.rx, {recorded.get(name, 0)} are recorded; see "
        f"python tools/plain.py --show {name}"
        for name, count in found.items()
        if count > recorded.get(name, 0)
    ]
    print("\n".join(problems) or f"{sum(found.values())} lines match tools/plain.rx")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
