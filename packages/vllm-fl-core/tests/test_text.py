"""Foreign text: secrets, escape sequences and forged lines are removed."""

from __future__ import annotations

import io
import logging

import pytest

from vllm_fl.logs import get_logger
from vllm_fl.text import INDENTED, clean, quote, scrub

FORGED = "no device\nERROR 11-22 10:00:00 [vllm_fl.engine] \x1b[31mall is lost\x1b[0m\r\u2028x"


class Mute(Exception):
    def __str__(self) -> str:
        raise SystemExit("no")

    __repr__ = __str__


def test_what_acts_on_a_terminal_is_shown_and_forges_no_line() -> None:
    text = clean("\x1b]0;title\x07 a\x9b31mb \u202etxt.exe \ud800 \u200b")
    assert text.isprintable()
    for shown in (r"\x1b", r"\x07", r"\x9b", r"\u202e", r"\ud800"):
        assert shown in text
    assert len(clean(FORGED).splitlines()) == 1
    first, *others = clean(FORGED, INDENTED).splitlines()
    assert first == "no device" and all(line.startswith("    ") for line in others)


def test_what_is_printable_stays_as_it_is_unless_it_is_endless() -> None:
    for text in ("", "rms_norm", "华为 é ≤ 30 ns", "a  b"):
        assert clean(text) == text
    assert len(clean("x" * 10**6)) < 30_000


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("PGPASSWORD", "s3cr3tpg", "cannot connect with s3cr3tpg"),
        ("GITHUB_PAT", "patpatpat", "401 for patpatpat"),
        ("MYSQL_PWD", "hunter22", "mysql -phunter22"),
        ("AUTHTOKEN", "abcdef123", "got abcdef123"),
        ("https_proxy", "http://me:p@ss/w0rd@proxy:80", "via http://me:p@ss/w0rd@proxy:80"),
        ("ALL_PROXY", "socks5://me:p@ssw0rd@proxy", "password p@ssw0rd refused"),
    ],
)
def test_secrets_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    monkeypatch.setenv(variable, value)
    text = clean(said)
    assert "<redacted>" in text
    for part in (value, "p@ss", "w0rd"):
        assert part not in text


@pytest.mark.parametrize(
    "said",
    [
        "password=correcthorse",
        "{'password': 'correcthorse'}",
        "Authorization: Bearer correcthorse",
        "https://host/x?token=correcthorse",
        "hf_correcthorsecorrecthorse",
        "github_pat_correcthorsecorrecthorse",
        "https://user:correct@horse@host/simple",
    ],
)
def test_what_looks_like_a_secret(said: str) -> None:
    assert "horse" not in scrub(said)


def test_words_and_paths_that_are_not_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_KEY", __file__)
    monkeypatch.setenv("PWD", "/gone/away")
    texts = ("unknown token: 'flagos'", "max_tokens=4096", "expected a token, got 1", "a@b.org")
    for text in (*texts, "per_token: bool", f"{__file__} /gone/away"):
        assert scrub(text) == text


def test_an_error_is_quoted_in_one_line_also_one_that_cannot_be_printed() -> None:
    assert quote(OSError("libacme.so\nis missing")) == "OSError: libacme.so is missing"
    assert quote(ValueError()) == "ValueError"
    assert quote(Mute()) == "Mute (it cannot be printed: its __str__ raises SystemExit)"


def test_a_log_line_is_cleaned_for_whoever_handles_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASSWORD", "s3cr3tdb")
    stream = io.StringIO()
    theirs = logging.StreamHandler(stream)
    log = get_logger("plugins")
    log.addHandler(theirs)
    try:
        log.warning("%s: %s", FORGED, "s3cr3tdb")
        log.warning("'%s': %s", "vendor.acme", Mute())
    finally:
        log.removeHandler(theirs)
    lines = stream.getvalue().split("\n")
    assert not any(line.startswith("ERROR") for line in lines)
    assert "\x1b" not in stream.getvalue() and "s3cr3tdb" not in stream.getvalue()
    assert "(vendor.acme, Mute: SystemExit: no)" in stream.getvalue()
