"""Fixtures of the tests on real models, and a table of their measurements."""

from __future__ import annotations

import pytest
from engines import once, shared_folder
from real_engines import model, scored, true

__all__ = ["model", "once", "scored", "shared_folder", "true"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows = {
        row
        for reports in terminalreporter.stats.values()
        for report in reports
        for key, row in getattr(report, "user_properties", ())
        if key == "seen"
    }
    if rows:
        terminalreporter.section("what was measured on real models")
        for row in sorted(rows):
            terminalreporter.write_line(row)
