"""`vllm-fl collect`: one archive for a bug report, without secrets."""

from __future__ import annotations

import argparse
import io
import os
import platform
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from glob import escape
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_fl.files import Draft
from vllm_fl.settings.schema import CONFIG, Settings
from vllm_fl.text import HIDDEN, is_secret, scrub

from ._engine import takes_vllms
from ._progress import doing
from ._show import UsageError, answer, print_table, say

PATIENCE = 600.0
"""Seconds for one verb: `doctor` imports torch and vLLM, from a network disk as well."""

LARGEST = 4 << 20
"""Bytes that are taken of one file at most."""

VARIABLES = re.compile(
    r"(VLLM|FL|FLAG\w*|TORCH\w*|TRITON|CUDA|HIP|ROCR|ASCEND\w*|NCCL|HCCL|GLOO|OMP|MKL|LD|PYTHON"
    r"|PROMETHEUS|RAY|HF|TRANSFORMERS)_|PATH$|HOME$|TMPDIR$|VIRTUAL_ENV$|PYTHON\w*$"
)
"""The variables that say something of an engine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of which engine, and where it goes. Without --out nothing is written."""
    takes_vllms(parser)
    parser.add_argument(
        "--model", metavar="DIR", help="the model whose plan is wanted; vLLM's arguments follow"
    )
    parser.add_argument(
        "--report",
        metavar="FILE",
        help=f"the report that the engine left (default: what {Settings.report.variable} or "
        f"{Settings.metrics.variable} says)",
    )
    parser.add_argument("--out", metavar="FILE", help="the archive, .tar.gz; it must not exist")
    parser.add_argument("--yes", action="store_true", help="write it without asking")


def run(arguments: argparse.Namespace) -> int:
    """Exit 0; 1 where the answer was no; 2 usage."""
    out = None if arguments.out is None else Path(arguments.out)
    if out is not None and not out.name.endswith(".tar.gz"):
        raise UsageError(f"--out {out}: the archive is a .tar.gz; give it a name that ends so")
    if out is not None and os.path.lexists(out):
        raise UsageError(f"--out {out}: it exists; name another file, or remove it")
    left = _left(arguments.report)
    with ExitStack() as stack:
        draft = None
        if out is not None:
            try:
                draft = stack.enter_context(Draft(out))
            except OSError as error:
                raise UsageError(f"--out {out}: it cannot be written: {error.strerror}") from error
        return _run(arguments, left, draft)


def _run(arguments: argparse.Namespace, left: list[Path], draft: Draft | None) -> int:
    may_ask = sys.stdin is not None and sys.stdin.isatty() and not arguments.json
    secrets = _secrets(arguments.more)
    parts = {name: _clean(text, secrets).encode() for name, text in _parts(arguments, left)}
    facts: dict[str, Any] = {
        "parts": [{"name": name, "bytes": len(data)} for name, data in parts.items()],
        "written": None,
    }
    if not arguments.json:
        print_table(["file", "bytes"], [(p["name"], p["bytes"]) for p in facts["parts"]])
    writes = draft is not None and (arguments.yes or (may_ask and _agreed(draft.path)))
    if draft is not None and writes:
        try:
            draft.put(_archive(parts))
        except OSError as error:
            raise UsageError(f"--out {draft.path}: {error.strerror}; nothing is left") from error
        facts["written"] = str(draft.path)
    answer(facts, _show, as_json=arguments.json)
    if draft is None and not arguments.json:
        say("--out FILE.tar.gz names where it goes")
    if draft is None or writes:
        return 0
    if may_ask:
        return 1
    raise UsageError("nobody can be asked here: --yes writes it")


def _agreed(out: Path) -> bool:
    say(f"Write them to {out}? [y/N]", error=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _secrets(more: list[str]) -> list[str]:
    """The values of vLLM's arguments whose names say that they are secret: `--api-key`."""
    pairs = zip(more, [*more, ""][1:], strict=True)
    split = [word.partition("=")[::2] if "=" in word else (word, after) for word, after in pairs]
    return [value for name, value in split if name.startswith("--") and is_secret(name) and value]


def _clean(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return scrub(text)


def _show(facts: Mapping[str, Any]) -> None:
    if facts["written"]:
        say(f"Written to {facts['written']}. Secrets are shown as {HIDDEN}; read it before it goes")
    else:
        say("Nothing is written.")


def _parts(arguments: argparse.Namespace, left: list[Path]) -> Iterator[tuple[str, str]]:
    """(name within the archive, text) of all that is collected, `left` by the engine included."""
    yield "versions.txt", "".join(f"{line}\n" for line in _versions())
    yield "environment.txt", "".join(f"{line}\n" for line in _environment())
    yield "plugins.txt", _said("plugins")
    yield "settings.txt", _said("policy")
    model = [] if arguments.model is None else ["--model", arguments.model, *arguments.more]
    yield "plan.txt", _said("plan", *model)
    yield "doctor.txt", _said("doctor", *model)
    settings_file = os.environ.get(CONFIG)
    if settings_file:
        yield f"files/{Path(settings_file).name}", _content(Path(settings_file))
    for path in left:
        yield f"engine/{path.name}", _content(path)


def _versions() -> Iterator[str]:
    yield f"python {sys.version.split()[0]} {sys.executable}"
    yield f"{platform.platform()} {platform.machine()}"
    found = {(d.metadata["Name"] or "?", d.version) for d in metadata.distributions()}
    yield from sorted(f"{name}=={version}" for name, version in found)


def _environment() -> Iterator[str]:
    for name, value in sorted(os.environ.items()):
        if VARIABLES.match(name) or name.startswith("VLLM_FL"):
            yield f"{name}={HIDDEN if is_secret(name) else value}"


def _said(*words: str) -> str:
    """What a verb prints, from a process of its own: it may be what is broken."""
    command = [sys.executable, "-m", "vllm_fl_tools.cli", *words]
    with doing(f"asking `vllm-fl {words[0]}`"):
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=PATIENCE,
                check=False,
            )
            text, end = done.stdout, f"exit status {done.returncode}"
        except subprocess.TimeoutExpired as error:
            text, end = error.stdout or b"", f"ended: it took more than {PATIENCE:.0f} s"
    return f"$ vllm-fl {' '.join(words)}\n{text.decode(errors='replace')}\n({end})\n"


def _left(report: str | None) -> list[Path]:
    """The reports and the metrics that workers have left, of all ranks."""
    metrics = os.environ.get(Settings.metrics.variable)
    if report is None:
        report = os.environ.get(Settings.report.variable)
    named = [] if not report else [Path(report)]
    if metrics:
        path = Path(metrics)
        named += [path, path.parent / f"{path.stem}.report.json"]
    found = {
        path: None
        for name in named
        for path in (name, *sorted(name.parent.glob(f"{escape(name.stem)}.*{escape(name.suffix)}")))
        if path.is_file()
    }
    if report and not any(path.stem.startswith(Path(report).stem) for path in found):
        raise UsageError(f"--report {report}: there is none")
    return [*found]


def _content(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(LARGEST).decode(errors="replace")
    except OSError as error:
        return f"it cannot be read: {error}\n"


def _archive(parts: Mapping[str, bytes]) -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as archive:
        for name, data in parts.items():
            info = tarfile.TarInfo(f"vllm-fl/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return whole.getvalue()
