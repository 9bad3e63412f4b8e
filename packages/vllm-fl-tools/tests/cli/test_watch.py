"""Which unit of a long run is at work is said where nothing else is."""

from __future__ import annotations

import sys
import threading

import pytest
from commands import lines

from vllm_fl_tools.cli import _progress
from vllm_fl_tools.cli._watch import Watch


def test_a_unit_that_takes_long_is_named_though_its_end_is_told_elsewhere(
    told: threading.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = Watch(7, 60.0, lambda: None)
    with _progress.progress("tune"):
        watch.at("rms_norm, 64 tokens", 3)
        assert told.wait(60)
    assert "vllm-fl tune: [3/7] rms_norm, 64 tokens (" in capsys.readouterr().err


@pytest.mark.parametrize("on_terminal", [True, False])
def test_a_unit_has_a_line_of_its_own_on_a_terminal(
    told: threading.Event,
    on_terminal: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_progress, "BEAT", 3600.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: on_terminal)
    watch = Watch(7, 60.0, lambda: None)
    with _progress.progress("verify"):
        watch.begin("rms_norm")
        watch.at("rope", 5)
    assert len(lines(capsys.readouterr().err, "verify")) == on_terminal
