"""Tables fold and never cut; secrets stay out."""

from __future__ import annotations

import io
import sys

import pytest

from vllm_fl.text import is_secret, scrub
from vllm_fl_tools.cli._show import folded, print_json, print_table, say

HEADINGS = ("implementation", "distribution", "reason")
ROWS = [
    ("vendor.acme", "vllm-fl-acme 0.1.0", "not available: /opt/acme/lib/libacme.so.3 is missing"),
    ("reference.torch", None, "the order says reference"),
]


@pytest.mark.parametrize("columns", [70, 80, 200])
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


def test_an_answer_is_folded_on_a_terminal_and_not_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    say("words that go on and on")
    say("errors that go on and on", error=True)
    told = capsys.readouterr()
    assert told.out == "words that go on and on\n"
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.setattr(sys, "stderr", errors := Terminal())
    say("words that go on and on")
    say("errors that go on and on", error=True)
    assert terminal.getvalue() == "words that go on and\non\n"
    assert errors.getvalue() == told.err == "errors that go on and on\n"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("1. what is wrong\n   Why: this\n", "1. what is\n   wrong\n   Why: this\n"),
        ("   Why: one two three", "   Why: one\n        two\n        three"),
        ("- one two three four", "- one two\n  three four"),
        ("a path: /opt/acme/lib/libacme.so", "a path:\n/opt/acme/lib/libacme.so"),
        # A command is copied: a line break would end it.
        ("   Do:  pip install vllm-fl-acme", "   Do:  pip install vllm-fl-acme"),
        # Paragraphs of a docstring are filled anew.
        ("one two three four\nfive six\n\nseven", "one two three\nfour five six\n\nseven"),
        (
            "    x: one two three\n        four\n    y: five",
            "    x: one\n        two\n        three\n        four\n    y: five",
        ),
    ],
)
def test_folding(text: str, wanted: str) -> None:
    assert folded(text, 13) == wanted


def test_no_escape_sequence_where_no_colour_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for wanted in (True, False):
        monkeypatch.setattr(sys, "stdout", terminal := Terminal())
        print_table(HEADINGS, ROWS)
        assert ("\x1b" in terminal.getvalue()) is wanted
        monkeypatch.setenv("NO_COLOR", "1")


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "token", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "OPENAI_API_KEY", "my-apikey"],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


def test_scrubbing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MY_API_KEY", "sk-abcdef")
    monkeypatch.setenv("SHORT_TOKEN", "on")
    assert scrub("key sk-abcdef, on, https://me:pw@host/x") == (
        "key <redacted>, on, https://<redacted>@host/x"
    )
    print_json(found=[{"error": "got sk-abcdef"}])
    print_table(("error",), [("got sk-abcdef",)])
    assert "sk-abcdef" not in capsys.readouterr().out
