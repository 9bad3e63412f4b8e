"""`vllm-fl new`: create the package of a backend, with tests that pass.

Example: vllm-fl new acme --platform cuda --ops rms_norm,silu_and_mul
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch.platforms import ForeignPlatform
from vllm_fl.dispatch.startup import is_foreign, known_platforms
from vllm_fl.plugins.installed import ENGINE_GROUPS, entry_points, metadata_of
from vllm_fl.settings.values import IN_TREE, PLATFORMS, normalise_platform
from vllm_fl.text import closest

from ..devices import torch_device
from ._other_plugins import release_of
from ._show import UsageError, print_answer, say

RESERVED = (
    *("ascend", "core", "cpu", "cuda", "default", "fl", "flagcx", "flaggems", "ops", "tools"),
    *("verify", "vllm"),
    *("flagos", "foreign", "impl", "reference", "stock", "vendor"),
)
"""Names that a vendor cannot have: vllm-fl's distributions and names, and selectors of orders."""

TEMPLATE = files("vllm_fl_tools") / "templates" / "backend"
"""A complete package of the vendor `acme`, for its own device."""

IMPL = "src/vllm_fl_acme/impl"
"""The template's folder with one module for each op, named after the op."""

STAYS = "prefer: stock  # ops that are not listed here do not change\n"
"""First line of the policy in a package for a third-party platform."""

TODO = """\
# TODO: torch's name of the device, such as "npu". The platform was not available when this file
# was created, so this is the name of the platform.
"""
"""Comment above a DEVICE that is unknown."""

EACH = re.compile(r".*\beach_op\b.*\n")
"""A line of the template that is repeated for each op."""


def template_ops() -> list[str]:
    """Return the ops that the template implements in plain PyTorch."""
    names = (path.name for path in (TEMPLATE / IMPL).iterdir())
    return sorted(name.removesuffix(".py") for name in names if name[0] != "_")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the vendor: one lower-case word (acme)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--platform",
        metavar="PLATFORM",
        help="for a library on another vendor's device: the platform that it extends "
        f"({', '.join(PLATFORMS)}; default: new hardware called NAME)",
    )
    where.add_argument(
        "--over",
        metavar="PLATFORM",
        help="for a device with a platform plugin for vLLM: its entry point. That plugin keeps "
        "the ops that NAME does not provide",
    )
    parser.add_argument(
        "--ops",
        metavar="OP,OP",
        default=",".join(template_ops()),
        help="the ops that it provides, from those with an example in PyTorch (default: all, "
        "%(default)s)",
    )
    parser.add_argument(
        "--dir",
        metavar="PATH",
        type=Path,
        default=Path(),
        help="the folder in which to create vllm-fl-NAME (default: here)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the package. Raises UsageError, and writes nothing, for invalid arguments."""
    name, parent = arguments.name, arguments.dir
    folder = parent / f"vllm-fl-{name}"
    ops = list(dict.fromkeys(map(str.strip, arguments.ops.split(","))))
    over = arguments.over is not None
    asked = arguments.over if over else arguments.platform
    platform = None if asked is None else normalise_platform(asked)
    _check_ops(ops)
    check = _check_plugin if over else _check_platform
    if platform is not None:
        check(platform)
    known = platform is None or not over or platform in PLATFORMS or is_foreign(platform)
    changes = _changes(name, platform, over=over, is_known=known)
    try:
        _check_name(name, parent, folder)
        _write(name, ops, changes, folder)
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error}") from error
    facts = {"name": name, "platform": platform or name, "ops": ops, "folder": str(folder)}
    if not known:
        facts["todo"] = f"DEVICE in {IMPL.replace('acme', name)}/__init__.py"
    print_answer(facts, _show, as_json=arguments.json)
    return 0


def _show(facts: Mapping[str, Any]) -> None:
    say(f"Wrote {facts['folder']}. Next:\n  cd {facts['folder']}")
    if "todo" in facts:
        say(f"  fill in {facts['todo']}: {facts['platform']} is not available on this machine")
    say("  pip install -e '.[testing]' && python -m pytest")


def _check_name(name: str, parent: Path, folder: Path) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]{,63}", name):
        raise UsageError(
            f"{name!r} is not a valid name: use one word of at most 64 lower-case letters and "
            "digits, such as acme"
        )
    if name in RESERVED:
        raise UsageError(f"{name!r} is reserved. Reserved names: {', '.join(RESERVED)}")
    if not parent.is_dir():
        raise UsageError(f"{parent} is not a folder: create it, or choose another with --dir")
    if folder.exists():
        raise UsageError(f"{folder} exists: remove it, or choose another folder with --dir")


def _check_ops(ops: Sequence[str]) -> None:
    known = template_ops()
    for op in ops:
        if op not in known:
            raise UsageError(
                f"--ops: there is no example of {op!r}.{closest(op, known)} "
                f"Known: {', '.join(known)}. For another op with a contract, add a module in the "
                "same folder: vllm-fl explain OP --contract prints the contract"
            )


def _check_platform(platform: str) -> None:
    if platform in PLATFORMS:
        return
    known = known_platforms(get_default_manager().registry.plugins)
    if platform not in known:
        raise UsageError(
            f"--platform {platform!r} is not a platform of vLLM or of an installed plugin."
            f"{closest(platform, known)} Known: {', '.join(known)}. For new hardware, omit it; for "
            "a device with a platform plugin for vLLM, use --over"
        )


def _check_plugin(platform: str) -> None:
    """Check the platform of `--over`.

    The device may be absent, because packages are written on any machine.
    """
    if platform in IN_TREE:
        raise UsageError(
            f"--over {platform!r}: it is part of vLLM, not of a plugin; use --platform"
        )
    found = {}
    for entry in entry_points(ENGINE_GROUPS[0]):
        if entry.name != "fl" and entry.dist is not None:
            distribution, release = metadata_of(entry.dist)[0], release_of(entry)
            found[ForeignPlatform(entry.name, distribution, release).name] = release
    if platform in found or platform in PLATFORMS:
        return
    installed = ", ".join(f"{name} ({release})" for name, release in sorted(found.items()))
    raise UsageError(
        f"--over {platform!r}: no installed platform plugin for vLLM has this entry point."
        f"{closest(platform, (*found, *PLATFORMS))} Installed: {installed or 'none'}. Install it "
        "first (pip install --no-deps; the device may be missing), or run this where it is "
        "installed"
    )


def _changes(name: str, platform: str | None, *, over: bool, is_known: bool) -> Mapping[str, str]:
    """Return the replacements in the template for a platform that is not named like its vendor.

    Args:
        name: the vendor.
        platform: None for a new platform of the vendor.
        over: whether a third-party plugin provides the platform, and stays installed.
        is_known: whether torch's name of the device is known.
    """
    if platform is None:
        return {}
    device = f'DEVICE = "{torch_device(platform)}"'
    if not is_known:
        device = f"{TODO}{device}"
    changes = {
        'DEVICE = "cpu"': device,
        f'platform == "{name}"': f'platform == "{platform}"',
        f"the platform `{name}`": f"the platform `{platform}`",
    }
    if not over:
        order = f"[vendor:{name}, stock, vendor, flagos, reference]"
        return {"[vendor, flagos, reference]": order, **changes}
    return {
        **changes,
        "[vendor, flagos, reference]": f"[vendor:{name}, foreign, stock]",
        "op_backends:\n": f"{STAYS}op_backends:\n",
        f"{name}.yaml": f"{platform}.yaml",
        f"{name.capitalize()}'s kernels": f"{name.capitalize()}'s kernels, over {platform}",
        "## Where it applies\n": f"""## Where it applies

It extends `{platform}`, the platform of a plugin for vLLM. Keep that plugin, and install this
package in the same environment. Ops that `{platform}.yaml` does not list do not change. See
`docs/platforms.md` of vllm-fl.
""",
    }


def _write(name: str, ops: Sequence[str], changes: Mapping[str, str], folder: Path) -> None:
    """Write the package to a temporary folder and rename it, so a failure leaves no files."""
    with tempfile.TemporaryDirectory(prefix=".vllm-fl-new-", dir=folder.parent) as scratch:
        written = Path(scratch) / "package"
        left_out = {f"{IMPL}/{op}.py" for op in template_ops() if op not in ops}
        with as_file(TEMPLATE) as template:
            for source in sorted(template.rglob("*")):
                inside = source.relative_to(template).as_posix()
                if source.is_dir() or "__pycache__" in inside or inside in left_out:
                    continue
                dotted = re.sub(r"(^|/)dot_", r"\1.", inside)
                target = written / _tailored(dotted, name, changes)
                target.parent.mkdir(parents=True, exist_ok=True)
                text = _each(source.read_text("utf-8"), ops)
                target.write_text(_tailored(text, name, changes), "utf-8")
        os.rename(written, folder)


def _each(text: str, ops: Sequence[str]) -> str:
    return EACH.sub(lambda line: "".join(line[0].replace("each_op", op) for op in ops), text)


def _tailored(text: str, name: str, changes: Mapping[str, str]) -> str:
    """Replace the template's vendor `acme` with `name`, and apply the changes."""
    text = text.replace("acme", name).replace("Acme", name.capitalize())
    for old, new in changes.items():
        text = text.replace(old, new)
    return text
