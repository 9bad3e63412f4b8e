"""A long run prints its running unit if it prints nothing else."""

from __future__ import annotations

import threading

import pytest

from vllm_fl_tools.cli import _progress
from vllm_fl_tools.cli._watch import Watch


def test_a_slow_unit_is_logged_even_if_its_end_is_logged_elsewhere(
    progress_printed: threading.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = Watch(7, 60.0, lambda: None)
    with _progress.progress("tune"):
        watch.begin("rms_norm, 64 tokens", 3)
        assert progress_printed.wait(60)
    assert "vllm-fl tune: [3/7] rms_norm, 64 tokens (" in capsys.readouterr().err
