"""Findings of `nox -s release-check` on made-up distributions."""

from __future__ import annotations

from pathlib import Path

import pytest
from release_check import inconsistencies


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """Core 0.10.0, already released, with unreleased tools, ops and a backend."""
    unreleased = "## {} (unreleased)\n".format
    core, ops = "vllm-fl-core>=0.10,<0.11", "vllm-fl-ops>=0.3,<0.4"
    texts = {
        "vllm-fl-core": (
            "0.10.0",
            ["pluggy>=1.5", ops],
            "## 0.10.0 (2026-11-22)\n\n- New.\n\n## 0.9.1 (2026-10-01)\n",
        ),
        "vllm-fl-ops": ("0.3.2", [core], unreleased("0.3.2")),
        "vllm-fl-tools": ("0.10.0", ["vllm-fl-core==0.10.0"], unreleased("0.10.0")),
        "vllm-fl-acme": ("0.2.0", [core, ops, "torch"], unreleased("0.2.0")),
    }
    made = {}
    for name, (version, dependencies, changelog) in texts.items():
        made[name] = folder = tmp_path / name
        folder.mkdir()
        (folder / "pyproject.toml").write_text(
            f'[project]\nname = "{name}"\nversion = "{version}"\ndependencies = {dependencies}\n'
        )
        (folder / "CHANGELOG.md").write_text(f"# Changelog of {name}\n\n{changelog}")
    return made


TAGS = {"vllm-fl-core-v0.10.0": lambda: "0.10.0"}


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("vllm-fl-core/CHANGELOG.md", "2026-11-22", "unreleased", "0.10.0 is released"),
        ("vllm-fl-core/CHANGELOG.md", "2026-10-01", "unreleased", "0.9.1 is released"),
        ("vllm-fl-core/CHANGELOG.md", "0.9.1", "0.11.0", "not in descending order"),
        ("vllm-fl-core/CHANGELOG.md", "(2026-11-22)", "today", "is not `## VERSION"),
        ("vllm-fl-acme/CHANGELOG.md", "0.2.0", "0.1.0", "begins with 0.1.0"),
        (
            "vllm-fl-acme/pyproject.toml",
            ">=0.10,<0.11",
            ">=0.9,<0.10",
            "version of vllm-fl-core needs",
        ),
        ("vllm-fl-tools/pyproject.toml", "core==0.10.0", "core>=0.10,<0.11", "needs ==0.10.0"),
        ("vllm-fl-core/pyproject.toml", ">=0.3,<0.4", ">=0.2,<0.3", "version of vllm-fl-ops needs"),
        ("vllm-fl-acme/pyproject.toml", ">=0.3,<0.4", ">=0.3", "requires vllm-fl-ops>=0.3, but"),
        ("vllm-fl-acme/pyproject.toml", "fl-ops>=0.3,<0.4", "fl-ops", "requires vllm-fl-ops, but"),
        ("vllm-fl-ops/pyproject.toml", ">=0.10,<0.11", "==0.10.0", "needs >=0.10,<0.11"),
    ],
)
def test_what_disagrees_is_named(
    folders: dict[str, Path], file: str, old: str, new: str, said: str
) -> None:
    replace(folders["vllm-fl-core"].parent / file, old, new)
    (problem,) = inconsistencies(folders, TAGS)
    assert said in problem and Path(file).parts[0] in problem


def test_a_tag_on_another_version_or_of_nothing_is_named(folders: dict[str, Path]) -> None:
    tags = {"vllm-fl-core-v0.10.0": lambda: "0.9.1", "absent-v1.0.0": lambda: "1.0.0"}
    wrong, nothing = inconsistencies(folders, tags)
    assert "vllm-fl-core-v0.10.0 is on a commit with version 0.9.1" in wrong
    assert "absent-v1.0.0 does not name a distribution" in nothing
