"""Tables fold and never cut; secrets stay out."""

from __future__ import annotations

import pytest

from vllm_fl.cli._show import print_json, print_table
from vllm_fl.text import is_secret, scrub

HEADINGS = ("implementation", "distribution", "reason")
ROWS = [
    ("vendor.acme", "vllm-fl-acme 0.1.0", "not available: /opt/acme/lib/libacme.so.3 is missing"),
    ("reference.torch", None, "token reference"),
]


@pytest.mark.parametrize("columns", [30, 40, 60, 80, 200])
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


def test_words_stay_whole_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_table(HEADINGS, ROWS)
    out = capsys.readouterr().out
    for word in ("implementation", "reference.torch", "vllm-fl-acme", "/opt/acme/lib/libacme.so.3"):
        assert word in out


def test_a_cell_is_text_and_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("a",), [("[red]no[/red] :smile:",)])
    assert "[red]no[/red] :smile:" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "token", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "OPENAI_API_KEY", "my-apikey"],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["VLLM_FL_PER_OP", "TOKENIZERS_PARALLELISM", "KEYBOARD", "PATH"])
def test_names_of_no_secrets(name: str) -> None:
    assert not is_secret(name)


def test_scrubbing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MY_API_KEY", "sk-abcdef")
    monkeypatch.setenv("SHORT_TOKEN", "on")
    assert scrub("key sk-abcdef, on, https://me:pw@host/x") == (
        "key <redacted>, on, https://<redacted>@host/x"
    )
    print_json(found=[{"error": "got sk-abcdef"}])
    print_table(("error",), [("got sk-abcdef",)])
    assert "sk-abcdef" not in capsys.readouterr().out
