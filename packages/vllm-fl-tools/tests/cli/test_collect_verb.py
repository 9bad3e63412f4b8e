"""`vllm-fl collect`: one archive, listed before it is written, without secrets."""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path

import pytest
from commands import Command

from vllm_fl_tools.cli import collect

SECRET = "hf_0123456789abcdefghij"


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """The verbs that were asked; they answer at once."""
    words: list[tuple[str, ...]] = []

    def said(*each: str) -> str:
        words.append(each)
        return f"{' '.join(each)} {SECRET}\n"

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(collect, "_said", said)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    return words


def inside(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        found = {m.name: archive.extractfile(m) for m in archive.getmembers()}
        return {name: file.read().decode() for name, file in found.items() if file}


def test_all_of_it_and_no_secret(fl: Command, tmp_path: Path, asked: list[tuple[str, ...]]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("chat.report.json", "chat.report.rank1.json", "chat.rank0.prom", "other.prom"):
        (run / name).write_text(f"{name} {SECRET}")
    (tmp_path / "fl.yaml").write_text(f"prefer: vendor # {SECRET}\n")
    done = fl(
        "collect", "--model", "tiny", "--enforce-eager", "--api-key", "mine-alone",
        "--out", "bug.tar.gz", "--yes", "--json",
        VLLM_FL_METRICS=str(run / "chat.prom"), VLLM_FL_CONFIG="fl.yaml", VLLM_API_KEY="s3cr3t-key",
    )  # fmt: skip
    assert done.status == 0, done.err
    found = inside(tmp_path / "bug.tar.gz")
    told = done.json()
    assert [f"vllm-fl/{part['name']}" for part in told["parts"]] == [*found]
    assert told["written"] == "bug.tar.gz"
    assert {name.removeprefix("vllm-fl/") for name in found} == {
        "versions.txt", "environment.txt", "plugins.txt", "settings.txt", "plan.txt", "doctor.txt",
        "files/fl.yaml", "engine/chat.report.json", "engine/chat.report.rank1.json",
        "engine/chat.rank0.prom",
    }  # fmt: skip
    whole = "".join(found.values())
    assert SECRET not in whole and "s3cr3t-key" not in whole and "mine-alone" not in whole
    assert "VLLM_FL_CONFIG=fl.yaml" in found["vllm-fl/environment.txt"]
    assert "vllm-fl-core==" in found["vllm-fl/versions.txt"].replace("_", "-")
    assert [words[0] for words in asked] == ["plugins", "policy", "plan", "doctor"]
    assert "--enforce-eager" in asked[2]


def test_nothing_is_written_that_was_not_named_and_agreed_to(
    fl: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fl("collect").status == 0
    assert fl("collect", "--yes").status == 0
    done = fl("collect", "--out", "bug.tar.gz")  # a test has no terminal
    assert done.status == 2 and "--yes" in done.err and "versions.txt" in done.out
    for answer, status in (("n\n", 1), ("\n", 1), ("", 1), ("y\n", 0)):
        assert [*tmp_path.iterdir()] == []
        terminal = io.StringIO(answer)
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stdin", terminal)
        assert fl("collect", "--out", "bug.tar.gz").status == status
    assert "vllm-fl/plan.txt" in inside(tmp_path / "bug.tar.gz")
    done = fl("collect", "--out", "bug.tar.gz", "--yes")
    assert done.status == 2 and "exists" in done.err


def test_what_cannot_be_done_is_said_before_anything_is_asked(
    fl: Command, tmp_path: Path, asked: list[tuple[str, ...]]
) -> None:
    assert fl("collect", "--report", "missing.json", "--out", "a.tar.gz", "--yes").status == 2
    assert fl("collect", "--out", "missing/bug.tar.gz", "--yes").status == 2
    done = fl("collect", "--out", "bug.zip", "--yes")
    assert done.status == 2 and "bug.zip: the archive is a .tar.gz" in done.err
    assert asked == [] and [*tmp_path.iterdir()] == []


def test_a_verb_that_fails_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    told = collect._said("no-such-verb")
    assert "$ vllm-fl no-such-verb" in told and "exit status 2" in told
