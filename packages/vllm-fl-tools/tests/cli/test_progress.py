"""No verb is silent for long."""

from __future__ import annotations

import os
import threading

import pytest
from commands import Command, Plugin, lines

from vllm_fl_tools.cli import _progress

STALLS = """
import vllm_fl_tools.cli._progress as _
assert _.told.wait(60), "nobody said what runs"

@hookimpl
def register_ops():
    return [vendor("acme")]
"""


@pytest.mark.parametrize("verb", ["ops", "settings"])
def test_what_a_plugin_does_is_named_while_it_runs(
    fl: Command, plugin: Plugin, told: threading.Event, verb: str
) -> None:
    name = plugin(STALLS)
    done = fl(verb, "--json")
    assert done.json()  # on standard output there is nothing else
    (line, *_) = lines(done.err, verb)
    running = [
        f" of plugin {each!r} " for each in (name, "ops", "operate", "verify")
    ]  # as it came to be told
    assert any(what in line for what in ("at work (", *running))
    assert told.is_set()


def test_a_verb_that_waits_for_a_child_says_so_without_a_thread(
    fl: Command, plugin: Plugin, told: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin()
    alive: list[bool] = []

    def fork() -> int:
        at = _progress._current
        assert at is not None and at._thread is not None
        alive.append(at._thread.is_alive())
        return forked()

    forked = os.fork
    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(_progress, "BEAT", 3600.0)  # the thread never gets to say anything
    done = fl("plugins", "--json")
    assert done.status == 0 and done.json()["plugins"]
    assert lines(done.err, "plugins")
    assert alive == [False]


def test_what_a_verb_is_at_is_said_until_it_is_done(
    told: threading.Event, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_progress, "EVERY", 0.0)
    monkeypatch.setattr(_progress, "BEAT", 3600.0)
    with _progress.progress("tune"), _progress.by_hand() as tick:
        with _progress.doing("reading the model"):
            tick("the import of acme")
        tick("the import of acme")
        tick("")
    said = [line.partition(" (")[0] for line in lines(capsys.readouterr().err, "tune")]
    assert said == [
        f"vllm-fl tune: {what}" for what in ("reading the model", "the import of acme", "at work")
    ]
