"""The command in this process, with plugins and distributions made by a test."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from vllm_fl.dispatch import reset_default_manager
from vllm_fl_tools.cli import _engine, _progress, _show, main

HEAD = """
import torch
from vllm_fl import BackendImplKind, OpImpl, PolicyDefaults, hookimpl
from torch.nn.functional import silu

def silu_and_mul(x):
    half = x.shape[-1] // 2
    return silu(x[..., :half]) * x[..., half:]

def act(name, fn=silu_and_mul, op="silu_and_mul", **fields):
    return OpImpl(op, f"vendor.{name}", BackendImplKind.VENDOR, fn, name, **fields)

def vendor(name, fn=silu_and_mul, **fields):
    return act(name, fn, fn.__name__, **fields)
"""
SOUND = """
@hookimpl
def register_ops():
    return [vendor("acme")]
"""
THREE = """
@hookimpl
def register_ops():
    return [
        vendor("acme"),
        vendor("zeta", available=lambda: "no zeta card"),
        OpImpl("silu_and_mul", "reference.torch", BackendImplKind.REFERENCE, silu_and_mul),
    ]
"""
LEAKS = ("VLLM_", "FLAGGEMS_", "FLAGCX_", "USE_FLAGGEMS", "COLUMNS", "FORCE_COLOR")
numbers = itertools.count()


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.out)
        assert answer["schema"] == 1
        return answer


Command = Callable[..., Done]
Plugin = Callable[..., str]
Distribution = Callable[..., Path]


@pytest.fixture(autouse=True)
def clean(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Hide the caller's settings, other tests' state, and vLLM, because a process has only one
    platform, chosen by its initial variables; tests/engine tests it."""
    monkeypatch.setattr(_engine, "find_spec", lambda name: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    for name in list(os.environ):
        if name.startswith(LEAKS):
            monkeypatch.delenv(name)
    monkeypatch.setattr(_progress, "QUIET", math.inf)  # tests read stderr, also on slow machines
    reset_default_manager()
    yield
    reset_default_manager()


@pytest.fixture
def fl(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """`fl("explain", "rms_norm", VLLM_FL_PREFER="vendor")`: the command with these variables."""

    def run(*args: str, **variables: str) -> Done:
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            reset_default_manager()
            capfd.readouterr()
            try:
                status = main(args)
            except SystemExit as end:  # argparse
                status = int(end.code or 0)
        return Done(status, *capfd.readouterr())

    return run


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plugin]:
    """`plugin(source)`: make a module on the path that is the only plugin; return its name."""
    made: list[str] = []
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(source: str = SOUND) -> str:
        name = f"fl_plugin_{next(numbers)}"
        (tmp_path / f"{name}.py").write_text(HEAD + dedent(source))
        made.append(name)
        monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", ",".join(made))
        monkeypatch.setenv("VLLM_FL_PLUGINS", "")
        return name

    yield make
    for name in made:
        sys.modules.pop(name, None)


@pytest.fixture
def distribution(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Distribution:
    """`distribution("acme", "1.0", owns=["vllm"])`: put its metadata first on the path."""

    def make(
        name: str, version: str = "1.0", *, owns: tuple[str, ...] = (), entry_points: str = ""
    ) -> Path:
        site = tmp_path_factory.mktemp("site")
        folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / "METADATA").write_text(metadata)
        (folder / "top_level.txt").write_text("\n".join(owns))
        (folder / "entry_points.txt").write_text(dedent(entry_points))
        monkeypatch.syspath_prepend(str(site))
        return site

    return make


@pytest.fixture
def progress_printed(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a verb has printed its progress, without waiting for a silence."""
    event = threading.Event()

    def say(text: str, *, error: bool) -> None:
        _show.say(text, error=error)
        event.set()

    monkeypatch.setattr(_progress, "QUIET", 0.0)
    monkeypatch.setattr(_progress, "BEAT", 0.01)
    monkeypatch.setattr(_progress, "say", say)
    monkeypatch.setattr(_progress, "printed", event, raising=False)
    return event


def lines(err: str, verb: str) -> list[str]:
    """A verb's progress lines."""
    return [line for line in err.splitlines() if line.startswith(f"vllm-fl {verb}: ")]


def offered(line: str, tmp_path: Path) -> set[str]:
    """A shell's completions for a line; the shell asks through variables, in its own process."""
    answer = tmp_path / "answer"
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    command = [sys.executable, "-c", "from vllm_fl_tools.cli import main; main()"]
    subprocess.run(command, check=False, env={**os.environ, **asked}, capture_output=True)
    return {word.strip() for word in answer.read_text().split("\v")}
