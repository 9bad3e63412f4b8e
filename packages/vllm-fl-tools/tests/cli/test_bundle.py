"""`vllm-fl doctor --bundle`: one archive, without secrets."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from commands import Command

from vllm_fl_tools.cli import _bundle, doctor

SECRET = "hf_0123456789abcdefghij"


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """The verbs that were run; each is stubbed."""
    words: list[tuple[str, ...]] = []

    def said(*each: str) -> str:
        words.append(each)
        return f"{' '.join(each)} {SECRET}\n"

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_bundle, "_said", said)
    found = {"facts": {"python": "3"}, "plugins": [], "unchecked": [], "findings": []}
    monkeypatch.setattr(doctor, "_examine", lambda arguments: found)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    return words


def test_it_has_everything_and_no_secret(
    fl: Command, tmp_path: Path, asked: list[tuple[str, ...]]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("chat.report.json", "chat.report.rank1.json", "chat.rank0.prom", "other.prom"):
        (run / name).write_text(f"{name} {SECRET}")
    (tmp_path / "fl.yaml").write_text(f"prefer: vendor # {SECRET}\n")
    done = fl(
        "doctor", "--model", "tiny", "--enforce-eager", "--api-key", "mine-alone",
        "--bundle", "bug.tar.gz", "--json",
        VLLM_FL_METRICS=str(run / "chat.prom"), VLLM_FL_CONFIG="fl.yaml", VLLM_API_KEY="s3cr3t-key",
    )  # fmt: skip
    assert done.status == 0 and done.json()["facts"] == {"python": "3"}, done.err
    with tarfile.open(tmp_path / "bug.tar.gz") as archive:
        files = {m.name.removeprefix("vllm-fl/"): archive.extractfile(m) for m in archive}
        found = {name: file.read().decode() for name, file in files.items() if file}
    assert {*found} == {
        "versions.txt", "environment.txt", "settings.txt", "plan.txt", "doctor.json",
        "files/fl.yaml", "engine/chat.report.json", "engine/chat.report.rank1.json",
        "engine/chat.rank0.prom",
    }  # fmt: skip
    whole = "".join(found.values())
    assert SECRET not in whole and "s3cr3t-key" not in whole and "mine-alone" not in whole
    assert "VLLM_FL_CONFIG=fl.yaml" in found["environment.txt"]
    assert "vllm-fl-core==" in found["versions.txt"].replace("_", "-")
    assert json.loads(found["doctor.json"])["facts"] == {"python": "3"}
    assert [words[0] for words in asked] == ["settings", "plan"] and "--enforce-eager" in asked[1]


@pytest.mark.parametrize(
    ("name", "problem"),
    [("missing/bug.tar.gz", "cannot write"), ("a.zip", "must end"), ("b.tar.gz", "exists")],
)
def test_an_archive_that_cannot_be_written(
    fl: Command, tmp_path: Path, asked: list[tuple[str, ...]], name: str, problem: str
) -> None:
    (tmp_path / "b.tar.gz").write_text("mine")
    done = fl("doctor", "--bundle", name)
    assert done.status == 2 and problem in done.err and asked == []
    assert (tmp_path / "b.tar.gz").read_text() == "mine"


def test_a_verb_that_fails_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    text = _bundle._said("no-such-verb")
    assert "$ vllm-fl no-such-verb" in text and "exit status 2" in text
