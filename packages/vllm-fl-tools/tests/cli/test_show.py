"""Tables wrap and never truncate; secrets are not printed."""

from __future__ import annotations

import io
import sys

import pytest

from vllm_fl_tools.cli._show import print_answer, print_table

HEADINGS = ("implementation", "distribution", "reason")
ROWS = [
    ("vendor.acme", "vllm-fl-acme 0.1.0", "not available: /opt/acme/lib/libacme.so.3 is missing"),
    ("reference.torch", None, "the order lists reference"),
]


@pytest.mark.parametrize("columns", [80, 200])
def test_a_table_is_as_wide_as_there_is_room_and_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    print_table(HEADINGS, ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= columns
    shown = sorted("".join(lines).replace("─", "").replace(" ", ""))
    wanted = sorted("".join(str(c or "-") for row in (HEADINGS, *ROWS) for c in row))
    assert shown == [c for c in wanted if c != " "]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_no_escape_sequence_where_no_colour_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for wanted in (True, False):
        monkeypatch.setattr(sys, "stdout", terminal := Terminal())
        print_table(HEADINGS, ROWS)
        assert ("\x1b" in terminal.getvalue()) is wanted
        monkeypatch.setenv("NO_COLOR", "1")


def test_no_secret_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_API_KEY", "sk-abcdef")
    print_answer({"found": [{"error": "got sk-abcdef"}]}, print, as_json=True)
    print_table(("error",), [("got sk-abcdef",)])
    assert "sk-abcdef" not in capsys.readouterr().out
