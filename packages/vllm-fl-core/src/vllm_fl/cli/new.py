"""`vllm-fl new`: write a vendor's package to start from."""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from importlib.resources import as_file, files
from pathlib import Path

from ._show import print_json, say

__all__ = ["add_arguments", "run"]

RESERVED = ("core", "default", "fl", "flagos", "impl", "reference", "stock", "vendor", "vllm")
"""Tokens of the policy, and names of our own."""

USAGE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The vendor's name, and where the package goes."""
    parser.add_argument("name", metavar="NAME", help="the vendor: one lower-case word (acme)")
    parser.add_argument(
        "--dir",
        metavar="PATH",
        type=Path,
        default=Path(),
        help="the folder in which vllm-fl-NAME is made (default: here)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Exit 2 and write nothing when the name or the folder will not do."""
    name, parent = arguments.name, arguments.dir
    folder = parent / f"vllm-fl-{name}"
    problem = _problem(name, parent, folder)
    if problem is None:
        try:
            _write(name, parent, folder)
        except OSError as error:
            problem = f"{folder} cannot be written: {error}"
    if problem is not None:
        say(f"vllm-fl new: {problem}", error=True)
        return USAGE
    if arguments.json:
        print_json(name=name, folder=str(folder))
    else:
        say(f"Wrote {folder}. Next:\n  cd {folder}\n  pip install -e '.[testing]' && pytest")
    return 0


def _problem(name: str, parent: Path, folder: Path) -> str | None:
    if not re.fullmatch(r"[a-z][a-z0-9]*", name):
        return f"{name!r} is no name: use one word of lower-case letters and digits, such as acme"
    if name in RESERVED:
        return f"{name!r} is taken; these are: {', '.join(RESERVED)}"
    if not parent.is_dir():
        return f"{parent} is no folder: make it first, or choose another with --dir"
    if folder.exists():
        return f"{folder} exists already: remove it, or choose another place with --dir"
    return None


def _write(name: str, parent: Path, folder: Path) -> None:
    """Write all of it beside its place, then rename: a failure leaves nothing behind."""
    with tempfile.TemporaryDirectory(prefix=".vllm-fl-new-", dir=parent) as scratch:
        written = Path(scratch) / "package"
        with as_file(files("vllm_fl") / "templates" / "backend") as template:
            for source in sorted(template.rglob("*")):
                inside = source.relative_to(template)
                if source.is_dir() or "__pycache__" in inside.parts:
                    continue
                target = written / re.sub(r"(^|/)dot_", r"\1.", _named(name, inside.as_posix()))
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(_named(name, source.read_text("utf-8")), "utf-8")
        os.rename(written, folder)


def _named(name: str, text: str) -> str:
    """The template is a whole package of the vendor `acme`; this is `name`'s."""
    return text.replace("acme", name).replace("Acme", name.capitalize())
