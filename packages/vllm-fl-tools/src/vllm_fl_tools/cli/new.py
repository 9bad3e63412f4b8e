"""`vllm-fl new`: write a vendor's package to start from."""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from vllm_fl.cli.common import UsageError, answer, say
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch.platforms import torch_device
from vllm_fl.dispatch.startup import known_platforms
from vllm_fl.settings.policy import closest
from vllm_fl.settings.values import PLATFORMS, normalise_platform

__all__ = ["add_arguments", "run", "template_ops"]

RESERVED = ("core", "default", "fl", "flagos", "impl", "reference", "stock", "vendor", "vllm")
"""Tokens of the policy, and names of our own."""

TEMPLATE = files("vllm_fl_tools") / "templates" / "backend"
"""A whole package of the vendor `acme`, for a device of its own."""

IMPL = "src/vllm_fl_acme/impl"
"""The folder of it that has a module for each op, of the op's name."""

EACH = re.compile(r".*\beach_op\b.*\n")
"""A line of the template that is there once for each op."""


def template_ops() -> list[str]:
    """The ops that the template has in plain PyTorch."""
    names = (path.name for path in (TEMPLATE / IMPL).iterdir())
    return sorted(name.removesuffix(".py") for name in names if name[0] != "_")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The vendor's name, what it brings for which device, and where the package goes."""
    parser.add_argument("name", metavar="NAME", help="the vendor: one lower-case word (acme)")
    parser.add_argument(
        "--platform",
        metavar="PLATFORM",
        help="for a library on somebody else's device: the platform whose policy it joins "
        f"({', '.join(PLATFORMS)}; default: NAME is a device of its own)",
    )
    parser.add_argument(
        "--ops",
        metavar="OP,OP",
        default=",".join(template_ops()),
        help="the ops that it brings, of those that have a plain form to start from (default: all "
        "of these: %(default)s)",
    )
    parser.add_argument(
        "--dir",
        metavar="PATH",
        type=Path,
        default=Path(),
        help="the folder in which vllm-fl-NAME is made (default: here)",
    )


def run(arguments: argparse.Namespace) -> int:
    """UsageError, and nothing is written, when the name or the folder will not do."""
    name, parent = arguments.name, arguments.dir
    folder = parent / f"vllm-fl-{name}"
    ops = list(dict.fromkeys(map(str.strip, arguments.ops.split(","))))
    platform = None if arguments.platform is None else normalise_platform(arguments.platform)
    problem = _problem(name, parent, folder) or _unknown(ops, platform)
    if problem is not None:
        raise UsageError(problem)
    try:
        _write(name, ops, platform, folder)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error}") from error
    facts = {"name": name, "platform": platform or name, "ops": ops, "folder": str(folder)}
    answer(facts, _show, as_json=arguments.json)
    return 0


def _show(facts: Mapping[str, Any]) -> None:
    say(f"Wrote {facts['folder']}. Next:\n  cd {facts['folder']}")
    say("  pip install -e '.[testing]' && python -m pytest")


def _problem(name: str, parent: Path, folder: Path) -> str | None:
    if not re.fullmatch(r"[a-z][a-z0-9]*", name):
        return (
            f"{name!r} is not a valid name: use one word of lower-case letters and digits, such as "
            "acme"
        )
    if name in RESERVED:
        return f"{name!r} is taken; these are: {', '.join(RESERVED)}"
    if not parent.is_dir():
        return f"{parent} is not a folder: make it first, or choose another with --dir"
    if folder.exists():
        return f"{folder} exists already: remove it, or choose another place with --dir"
    return None


def _unknown(ops: Sequence[str], platform: str | None) -> str | None:
    known = template_ops()
    for op in ops:
        if op not in known:
            return (
                f"--ops: there is no plain form of {op!r} to start from.{closest(op, known)} "
                f"Known: {', '.join(known)}. Another op that has a contract is a further module "
                "beside them: vllm-fl explain OP prints its contract"
            )
    if platform is not None and platform not in PLATFORMS:
        platforms = known_platforms(get_default_manager().registry.plugins)
        if platform not in platforms:
            return (
                f"--platform {platform!r} is not a platform of vLLM's or of an installed plugin's."
                f"{closest(platform, platforms)} Known: {', '.join(platforms)}. For a device of "
                "your own leave it out"
            )
    return None


def _write(name: str, ops: Sequence[str], platform: str | None, folder: Path) -> None:
    """Write all of it beside its place, then rename: a failure leaves nothing behind."""
    with tempfile.TemporaryDirectory(prefix=".vllm-fl-new-", dir=folder.parent) as scratch:
        written = Path(scratch) / "package"
        left_out = {f"{IMPL}/{op}.py" for op in template_ops() if op not in ops}
        with as_file(TEMPLATE) as template:
            for source in sorted(template.rglob("*")):
                inside = source.relative_to(template).as_posix()
                if source.is_dir() or "__pycache__" in inside or inside in left_out:
                    continue
                target = written / _named(name, re.sub(r"(^|/)dot_", r"\1.", inside))
                target.parent.mkdir(parents=True, exist_ok=True)
                text = _tailored(source.read_text("utf-8"), ops, platform)
                target.write_text(_named(name, text), "utf-8")
        os.rename(written, folder)


def _tailored(text: str, ops: Sequence[str], platform: str | None) -> str:
    """The template's text for these ops on this platform; its name is still `acme`."""
    text = EACH.sub(lambda line: "".join(line[0].replace("each_op", op) for op in ops), text)
    if platform is None:
        return text
    for old, new in {
        "[vendor, flagos, reference]": "[vendor:acme, stock, vendor, flagos, reference]",
        'DEVICE = "cpu"': f'DEVICE = "{torch_device(platform)}"',
        'platform == "acme"': f'platform == "{platform}"',
        "the platform `acme`": f"the platform `{platform}`",
    }.items():
        text = text.replace(old, new)
    return text


def _named(name: str, text: str) -> str:
    """The template is a whole package of the vendor `acme`; this is `name`'s."""
    return text.replace("acme", name).replace("Acme", name.capitalize())
