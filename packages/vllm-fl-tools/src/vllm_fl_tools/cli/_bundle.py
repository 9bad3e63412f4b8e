"""`vllm-fl doctor --bundle`: one archive for a bug report, without secrets."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from glob import escape
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_fl.settings.schema import CONFIG, Settings
from vllm_fl.text import REDACTED, is_secret, scrub
from vllm_fl_tools.atomic_write import Draft

from ._options import draft_of
from ._progress import doing
from ._show import UsageError, say

PATIENCE = 600.0
"""Time limit of one verb in seconds. It imports torch and vLLM, perhaps from a network disk."""

LARGEST = 4 << 20
"""Maximum bytes of one file."""

BUNDLED_VARIABLES = re.compile(
    r"(VLLM|FL|FLAG\w*|TORCH\w*|TRITON|CUDA|HIP|ROCR|ASCEND\w*|NCCL|HCCL|GLOO|OMP|MKL|LD|PYTHON"
    r"|PROMETHEUS|RAY|HF|TRANSFORMERS)_|PATH$|HOME$|TMPDIR$|VIRTUAL_ENV$|PYTHON\w*$"
)
"""Environment variables that affect an engine."""


def archive_of(path: str) -> Draft:
    """Return a draft of the archive.

    Raises:
        UsageError: the name is invalid, the file exists, or it cannot be written.
    """
    out = Path(path)
    if not out.name.endswith(".tar.gz"):
        raise UsageError(f"--bundle {out}: the name must end with .tar.gz")
    if os.path.lexists(out):
        raise UsageError(f"--bundle {out}: the file exists; choose another name, or remove it")
    return draft_of(path, "--bundle")


def write(draft: Draft, found: Mapping[str, Any], model: str | None, more: Sequence[str]) -> None:
    """Write the archive, with the doctor's answer `found`, to the draft of `archive_of`.

    `model` and `more`, arguments for vLLM, determine the plan in the archive.
    """
    secrets = _secrets(more)
    parts = {name: _clean(text, secrets).encode() for name, text in _parts(found, model, more)}
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as archive:
        for name, data in parts.items():
            info = tarfile.TarInfo(f"vllm-fl/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    try:
        draft.put(whole.getvalue())
    except OSError as error:
        raise UsageError(f"--bundle {draft.path}: {error.strerror}; no file was written") from error
    say(
        f"vllm-fl: wrote {', '.join(parts)} to {draft.path}. Secrets are shown as {REDACTED}; read "
        "it before you send it",
        error=True,
    )


def _secrets(more: Sequence[str]) -> list[str]:
    """Return the values of secret arguments (`--api-key`) for vLLM."""
    pairs = zip(more, [*more, ""][1:], strict=True)
    split = [word.partition("=")[::2] if "=" in word else (word, after) for word, after in pairs]
    return [value for name, value in split if name.startswith("--") and is_secret(name) and value]


def _clean(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    return scrub(text)


def _parts(
    found: Mapping[str, Any], model: str | None, more: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield (name in the archive, text) of each part."""
    yield "versions.txt", "".join(f"{line}\n" for line in _versions())
    yield "environment.txt", "".join(f"{line}\n" for line in _environment())
    yield "doctor.json", json.dumps(found, indent=2)
    yield "settings.txt", _said("settings")
    yield "plan.txt", _said("plan", *([] if model is None else ["--model", model, *more]))
    if settings_file := os.environ.get(CONFIG):
        yield f"files/{Path(settings_file).name}", _content(Path(settings_file))
    for path in _left():
        yield f"engine/{path.name}", _content(path)


def _versions() -> Iterator[str]:
    yield f"python {sys.version.split()[0]} {sys.executable}"
    yield f"{platform.platform()} {platform.machine()}"
    found = {(d.metadata["Name"] or "?", d.version) for d in metadata.distributions()}
    yield from sorted(f"{name}=={version}" for name, version in found)


def _environment() -> Iterator[str]:
    for name, value in sorted(os.environ.items()):
        if BUNDLED_VARIABLES.match(name) or name.startswith("VLLM_FL"):
            yield f"{name}={REDACTED if is_secret(name) else value}"


def _said(*words: str) -> str:
    """Return a verb's output. It runs in a separate process because it may crash."""
    command = [sys.executable, "-m", "vllm_fl_tools.cli", *words]
    with doing(f"running `vllm-fl {words[0]}`"):
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
            text, end = error.stdout or b"", f"killed after {PATIENCE:.0f} s"
    return f"$ vllm-fl {' '.join(words)}\n{text.decode(errors='replace')}\n({end})\n"


def _left() -> list[Path]:
    """Return the existing reports and metrics of workers, of all ranks."""
    metrics = os.environ.get(Settings.metrics.variable)
    named = [Path(metrics), Path(metrics).with_suffix(".report.json")] if metrics else []
    found = {
        path: None
        for name in named
        for path in (name, *sorted(name.parent.glob(f"{escape(name.stem)}.*{escape(name.suffix)}")))
        if path.is_file()
    }
    return [*found]


def _content(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(LARGEST).decode(errors="replace")
    except OSError as error:
        return f"cannot be read: {error}\n"
