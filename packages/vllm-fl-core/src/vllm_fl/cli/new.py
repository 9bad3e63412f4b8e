"""`vllm-fl new`: write a vendor's package to start from."""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from types import MappingProxyType

from ..dispatch import get_default_manager
from ..dispatch.startup import known_platforms
from ..plugins.loading import known_contracts
from ..settings.policy import closest
from ..settings.values import PLATFORMS, normalise_platform
from ._show import UsageError, print_json, say

__all__ = ["add_arguments", "run"]

RESERVED = ("core", "default", "fl", "flagos", "impl", "reference", "stock", "vendor", "vllm")
"""Tokens of the policy, and names of our own."""

TEMPLATE = files("vllm_fl") / "templates" / "backend"
"""A whole package of the vendor `acme`."""

MARK = re.compile(r"\s*(?:#|<!--) \[\[ ([\w ]+) \]\](?: -->)?")
"""A line of the template: what follows, to `end`, is for these ops, or for a device of one's own or
somebody's platform."""

TORCH_DEVICES = {"ascend": "npu"}
"""Platform -> torch's name of its devices, where that is another."""


@cache
def template_ops() -> Mapping[str, tuple[str, ...]]:
    """The template's modules, and the ops in each: the functions that bear a contract's name."""
    found = {}
    for path in (TEMPLATE / "src" / "vllm_fl_acme" / "impl").iterdir():
        if path.name.endswith(".py"):
            functions = re.findall(r"^def (\w+)\(", path.read_text("utf-8"), re.M)
            known = known_contracts().contracts
            if ops := tuple(name for name in functions if name in known):
                found[path.name.removesuffix(".py")] = ops
    return MappingProxyType(dict(sorted(found.items())))


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
        help="the ops that it brings, of those that have a plain form to start from (default: all "
        f"of these: {', '.join(_ops())})",
    )
    parser.add_argument(
        "--dir",
        metavar="PATH",
        type=Path,
        default=Path(),
        help="the folder in which vllm-fl-NAME is made (default: here)",
    )


@dataclass(frozen=True)
class Package:
    """What is written: the vendor's name, the ops, and whose platform, or None for its own."""

    name: str
    ops: tuple[str, ...]
    platform: str | None


def run(arguments: argparse.Namespace) -> int:
    """UsageError, and nothing is written, when the name or the folder will not do."""
    name, parent = arguments.name, arguments.dir
    folder = parent / f"vllm-fl-{name}"
    asked = arguments.ops
    ops = tuple(dict.fromkeys(_ops() if asked is None else map(str.strip, asked.split(","))))
    platform = None if arguments.platform is None else normalise_platform(arguments.platform)
    problem = _problem(name, parent, folder) or _unknown(ops, platform)
    if problem is None:
        try:
            _write(Package(name, ops, platform), parent, folder)
        except OSError as error:
            problem = f"{folder} cannot be written: {error}"
    if problem is not None:
        raise UsageError(problem)
    if arguments.json:
        print_json(name=name, platform=platform or name, ops=list(ops), folder=str(folder))
    else:
        say(f"Wrote {folder}. Next:\n  cd {folder}")
        say("  pip install -e '.[testing]' && python -m pytest")
    return 0


def _ops() -> list[str]:
    """The ops that the template has."""
    return sorted(op for ops in template_ops().values() for op in ops)


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
    for op in ops:
        named = known_contracts().contracts
        if op not in named:
            return f"--ops: no contract names {op!r}.{closest(op, named)} " + (
                f"Known: {', '.join(_ops())}"
            )
        if op not in _ops():
            return (
                f"--ops: there is no plain form of {op!r} to start from. Known: "
                f"{', '.join(_ops())}. Make the package with these or some of them, and write a "
                f"function and an OpImpl of {op!r} beside them: vllm-fl explain {op} prints its "
                "contract"
            )
    if platform is not None and platform not in PLATFORMS:
        known = known_platforms(get_default_manager().registry.plugins)
        if platform not in known:
            return (
                f"--platform {platform!r} is not a platform of vLLM's or of an installed plugin's."
                f"{closest(platform, known)} Known: {', '.join(known)}. For a device of your own "
                "leave it out"
            )
    return None


def _write(package: Package, parent: Path, folder: Path) -> None:
    """Write all of it beside its place, then rename: a failure leaves nothing behind."""
    with tempfile.TemporaryDirectory(prefix=".vllm-fl-new-", dir=parent) as scratch:
        written = Path(scratch) / "package"
        with as_file(TEMPLATE) as template:
            for source in sorted(template.rglob("*")):
                inside = source.relative_to(template)
                if source.is_dir() or "__pycache__" in inside.parts:
                    continue
                has = template_ops().get(inside.stem)
                if has and not {*has} & {*package.ops}:
                    continue
                place = re.sub(r"(^|/)dot_", r"\1.", _named(package.name, inside.as_posix()))
                target = written / place
                target.parent.mkdir(parents=True, exist_ok=True)
                text = _tailored(package, source.read_text("utf-8"))
                target.write_text(_named(package.name, text), "utf-8")
        os.rename(written, folder)


def _tailored(package: Package, text: str) -> str:
    """The template's text for these ops on this platform; its name is still `acme`."""
    chosen = {*package.ops, "own" if package.platform is None else "platform"}
    left_out = [op for op in _ops() if op not in package.ops]
    kept, keeps = [], True
    for line in text.splitlines():
        if mark := MARK.fullmatch(line):
            words = {*mark[1].split()}
            keeps = words == {"end"} or bool(words & chosen)
        elif keeps and not any(
            line.startswith(f"  {op}:") or re.fullmatch(rf'    "(supports_)?{op}",', line)
            for op in left_out
        ):
            kept.append(line)
    modules = [m for m, ops in template_ops().items() if {*ops} & {*package.ops}]
    edits = {
        _listed([op for ops in template_ops().values() for op in ops]): _listed(package.ops),
        "explain rms_norm": f"explain {package.ops[0]}",
        f"import {', '.join(template_ops())}": f"import {', '.join(modules)}",
        _united(template_ops()): _united(modules),
    }
    if package.platform is not None:
        edits |= {
            "[vendor, flagos, reference]": "[vendor:acme, stock, vendor, flagos, reference]",
            'DEVICE = "cpu"': f'DEVICE = "{TORCH_DEVICES.get(package.platform, package.platform)}"',
            'platform == "acme"': f'platform == "{package.platform}"',
            "the platform `acme`": f"the platform `{package.platform}`",
            "on Acme's hardware": f"of Acme for the platform {package.platform}",
            "that has the device: `runs-on: [self-hosted, acme]`": "that has the device",
        }
    text = "\n".join(kept).strip("\n") + "\n" if kept else ""
    for old, new in edits.items():
        text = text.replace(old, new)
    return re.sub(r"\n{4,}", "\n\n\n", text)


def _listed(ops: Sequence[str]) -> str:
    """The ops as a sentence names them."""
    quoted = [f"`{op}`" for op in ops]
    return " and ".join(filter(None, (", ".join(quoted[:-1]), quoted[-1])))


def _united(modules: Iterable[str]) -> str:
    """The OPS of the modules as `register_ops` unites them."""
    return f"[{', '.join(f'*{module}.OPS' for module in modules)}]"


def _named(name: str, text: str) -> str:
    """The template is a whole package of the vendor `acme`; this is `name`'s."""
    return text.replace("acme", name).replace("Acme", name.capitalize())
