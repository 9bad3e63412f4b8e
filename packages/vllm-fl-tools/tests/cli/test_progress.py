"""No verb is silent for long."""

from __future__ import annotations

import threading

import pytest
from commands import Command, Plugin, lines

from vllm_fl_tools.cli import _progress
from vllm_fl_tools.cli._watch import Watch

STALLS = """
import vllm_fl_tools.cli._progress as _
assert _.printed.wait(60), "no message says what runs"

@hookimpl
def register_ops():
    return [vendor("acme")]
"""


@pytest.mark.parametrize("verb", ["plan", "settings"])
def test_what_a_plugin_does_is_named_while_it_runs(
    fl: Command, plugin: Plugin, progress_printed: threading.Event, verb: str
) -> None:
    name = plugin(STALLS)
    done = fl(verb, "--json")
    assert done.json()  # standard output has nothing else
    (line, *_) = lines(done.err, verb)
    running = [
        f" of plugin {each!r} " for each in (name, "ops", "operate", "verify")
    ]  # depends on timing
    assert any(what in line for what in ("working (", *running))
    assert progress_printed.is_set()


def test_what_a_verb_does_is_reported_until_it_is_done(
    progress_printed: threading.Event,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_progress, "EVERY", 0.0)
    tick = _progress.current_progress.tick
    with _progress.progress("tune", forks=True):
        with _progress.doing("reading the model"):
            tick("the import of acme")
        tick("the import of acme")
        tick("")
    said = [line.partition(" (")[0] for line in lines(capsys.readouterr().err, "tune")]
    assert said == [
        f"vllm-fl tune: {what}" for what in ("reading the model", "the import of acme", "working")
    ]


def test_a_slow_unit_is_logged_while_it_runs(
    progress_printed: threading.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = Watch(7, 60.0, lambda: None)
    with _progress.progress("tune"):
        watch.begin("rms_norm, 64 tokens", 3)
        assert progress_printed.wait(60)
    _, printed = capsys.readouterr()
    assert "vllm-fl tune: [3/7] rms_norm, 64 tokens (" in printed
