"""`vllm-fl new`: what it writes, and that it writes nothing when it cannot."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import yaml

from vllm_fl.cli import main
from vllm_fl.dispatch.contracts import contracts


def files(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def test_writes_the_common_skeleton(tmp_path: Path) -> None:
    assert main(["new", "foo", "--dir", str(tmp_path)]) == 0
    folder = tmp_path / "vllm-fl-foo"
    package = "src/vllm_fl_foo"
    assert files(folder) == {
        ".github/workflows/ci.yml",
        ".gitignore",
        "CHANGELOG.md",
        "README.md",
        "pyproject.toml",
        "tests/test_conformance.py",
        "tests/xfails.toml",
        *(f"{package}/{n}" for n in ("__init__.py", "foo.yaml", "plugin.py", "py.typed")),
        *(f"{package}/impl/{n}.py" for n in ("__init__", "activation", "normalization", "rotary")),
    }
    assert {path.name for path in tmp_path.iterdir()} == {"vllm-fl-foo"}
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == "vllm-fl-foo"
    assert project["entry-points"] == {"vllm_fl.plugin": {"foo": "vllm_fl_foo.plugin"}}
    orders = yaml.safe_load((folder / package / "foo.yaml").read_text())["op_backends"]
    assert set(orders) == set(contracts())


def test_nothing_of_the_template_s_own_name_is_left(tmp_path: Path) -> None:
    main(["new", "foo", "--dir", str(tmp_path)])
    for path in (tmp_path / "vllm-fl-foo").rglob("*"):
        assert "acme" not in path.name
        assert path.is_dir() or "acme" not in path.read_text().lower(), path


def test_prints_json_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "foo", "--dir", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "schema": 1,
        "name": "foo",
        "folder": str(tmp_path / "vllm-fl-foo"),
    }


@pytest.mark.parametrize(
    "name", ["Acme", "my-chip", "my_chip", "3d", "", "é", "a b", "../up", "vendor", "stock"]
)
def test_a_bad_name_is_one_error_and_nothing_is_written(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", name, "--dir", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("vllm-fl new: ")
    assert repr(name) in said.err
    assert said.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vllm-fl-foo").mkdir()
    assert main(["new", "foo", "--dir", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert list(tmp_path.rglob("*")) == [tmp_path / "vllm-fl-foo"]


def test_a_missing_parent_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "foo", "--dir", str(tmp_path / "no")]) == 2
    assert f"{tmp_path / 'no'} is no folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
