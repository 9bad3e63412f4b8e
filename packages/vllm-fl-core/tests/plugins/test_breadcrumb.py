"""Notes of running steps: the next process finds only steps that ended a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_fl.plugins import breadcrumb

RUN = (
    "from vllm_fl.plugins.breadcrumb import noting\n"
    "import os, sys, time\n"
    "with noting({what!r}):\n    "
)


@pytest.fixture(autouse=True)
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this test's notes, with no notes cached from other tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    breadcrumb._left.cache_clear()
    return tmp_path / "vllm-fl" / "running"


def run(code: str, what: str = "the import of acme", **variables: str) -> int:
    env = {**os.environ, **variables}
    script = RUN.format(what=what) + code
    return subprocess.run([sys.executable, "-c", script], env=env, check=False).returncode


def whats() -> list[str]:
    return [crumb.what for crumb in breadcrumb.lost()]


def test_what_ends_the_process_is_left() -> None:
    assert run("os._exit(0)") == 0
    assert run("os.abort()", "the first run of 'vendor.acme'") == -signal.SIGABRT
    first, second = breadcrumb.lost()
    assert (first.what, second.what) == ("the import of acme", "the first run of 'vendor.acme'")
    assert first.when <= second.when <= time.time()
    assert first.file.exists() and str(first.pid) in str(first)


@pytest.mark.parametrize(
    "code", ["pass", "sys.exit(3)", "raise OSError", "raise KeyboardInterrupt"]
)
def test_what_ends_by_itself_leaves_nothing(notes: Path, code: str) -> None:
    run(code)
    assert list(notes.iterdir()) == []


def test_the_innermost_is_named() -> None:
    run("with noting('the inner one'): os._exit(0)", "the outer one")
    run("\n    with noting('an inner one that ended'): pass\n    os._exit(0)", "another outer one")
    assert whats() == ["the inner one", "another outer one"]


def test_a_process_that_lives_is_no_finding_and_what_it_runs_is_read(notes: Path) -> None:
    host, before = os.uname().nodename, time.time()
    script = RUN.format(what="the import of acme") + "print(1, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as living:
        assert living.stdout is not None
        living.stdout.readline()
        assert len(list(notes.iterdir())) == 1
        assert breadcrumb.lost() == ()
        assert breadcrumb.run_by(host, living.pid, before) == "the import of acme"
        assert breadcrumb.run_by(host, living.pid, time.time()) == ""  # of an earlier process
        assert breadcrumb.run_by("elsewhere", living.pid, before) == ""
        living.kill()
        living.wait()
        assert whats() == ["the import of acme"]


def test_what_has_run_to_its_end_since_is_forgotten() -> None:
    for _ in range(3):
        run("os._exit(0)")
    assert whats() == ["the import of acme"]
    with breadcrumb.noting("the import of another"):
        pass
    assert whats() == ["the import of acme"]
    with breadcrumb.noting("the import of acme"):
        pass
    assert whats() == []


@pytest.mark.parametrize("cache", ["/proc/nowhere", "/dev/null", "/dev/full"])
def test_without_a_place_for_notes_everything_runs(cache: str) -> None:
    assert run("sys.exit(7)", XDG_CACHE_HOME=cache) == 7


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'[{"what": 1}]', b"\xff\xfe", b"[" * 100_000, b'{"a": 1}']
)
def test_a_file_that_others_wrote_is_no_finding(notes: Path, content: bytes) -> None:
    notes.mkdir(parents=True)
    (notes / "x.json").write_bytes(content)
    assert breadcrumb.lost() == ()


def test_notes_of_a_command_are_kept_apart(tmp_path: Path) -> None:
    assert run("os.abort()", **{breadcrumb.FOLDER: str(tmp_path)}) == -signal.SIGABRT
    crumb = breadcrumb.last(tmp_path)
    assert crumb is not None and (crumb.what, crumb.lives) == ("the import of acme", False)
    assert run("os.abort()", **{breadcrumb.FOLDER: ""}) == -signal.SIGABRT
    assert breadcrumb.lost() == ()


def test_what_takes_long_is_named_while_it_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(breadcrumb, "SLOW", 0.01)
    until = time.monotonic() + 60
    with breadcrumb.noting("the import of acme"):
        while "the import of acme is still running" not in caplog.text:
            assert time.monotonic() < until
            time.sleep(0.01)
