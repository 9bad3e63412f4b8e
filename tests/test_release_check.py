"""What `nox -s release-check` finds before a release, on distributions that are made up here."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
import release_check
from release_check import inconsistencies, index, install_lines, look_into

import envs


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """Core 0.10.0, released before, and its tools, ops and a backend that are not."""
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
            + ('optional-dependencies.tools = ["vllm-fl-tools==0.10.0"]\n' * (name[8:] == "core"))
        )
        (folder / "CHANGELOG.md").write_text(f"# Changelog of {name}\n\n{changelog}")
    return made


TAGS = {"core-v0.10.0": lambda: "0.10.0"}


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_what_agrees_is_quiet(folders: dict[str, Path]) -> None:
    assert list(inconsistencies(folders, TAGS)) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("vllm-fl-core/CHANGELOG.md", "2026-11-22", "unreleased", "0.10.0 is released"),
        ("vllm-fl-core/CHANGELOG.md", "2026-10-01", "unreleased", "0.9.1 is released"),
        ("vllm-fl-core/CHANGELOG.md", "0.9.1", "0.11.0", "do not fall"),
        ("vllm-fl-core/CHANGELOG.md", "(2026-11-22)", "today", "is not `## VERSION"),
        ("vllm-fl-acme/CHANGELOG.md", "0.2.0", "0.1.0", "begins with 0.1.0"),
        ("vllm-fl-acme/pyproject.toml", ">=0.10,<0.11", ">=0.9,<0.10", "version of core calls for"),
        ("vllm-fl-tools/pyproject.toml", "core==0.10.0", "core>=0.10,<0.11", "calls for ==0.10.0"),
        ("vllm-fl-core/pyproject.toml", "tools==0.10.0", "tools==0.9.1", "core[tools] asks for"),
        ("vllm-fl-core/pyproject.toml", "tools==0.10.0", "tools", "calls for ==0.10.0"),
        ("vllm-fl-core/pyproject.toml", ">=0.3,<0.4", ">=0.2,<0.3", "version of ops calls for"),
        ("vllm-fl-acme/pyproject.toml", ">=0.3,<0.4", ">=0.3", "asks for vllm-fl-ops>=0.3, and"),
        ("vllm-fl-acme/pyproject.toml", "fl-ops>=0.3,<0.4", "fl-ops", "asks for vllm-fl-ops, and"),
        ("vllm-fl-ops/pyproject.toml", ">=0.10,<0.11", "==0.10.0", "calls for >=0.10,<0.11"),
    ],
)
def test_what_disagrees_is_named(
    folders: dict[str, Path], file: str, old: str, new: str, said: str
) -> None:
    replace(folders["vllm-fl-core"].parent / file, old, new)
    (problem,) = inconsistencies(folders, TAGS)
    assert said in problem and Path(file).parts[0] in problem


def test_tools_of_another_version_than_core_are_named(folders: dict[str, Path]) -> None:
    for file in ("pyproject.toml", "CHANGELOG.md"):
        path = folders["vllm-fl-tools"] / file
        path.write_text(path.read_text().replace("0.10.0", "0.10.1", 1))
    (problem,) = inconsistencies(folders, TAGS)
    assert problem == "vllm-fl-tools is 0.10.1, and vllm-fl-core 0.10.0: both are of one version"


def test_a_tag_on_another_version_or_of_nothing_is_named(folders: dict[str, Path]) -> None:
    tags = {"core-v0.10.0": lambda: "0.9.1", "nobody-v1.0.0": lambda: "1.0.0"}
    wrong, nothing = inconsistencies(folders, tags)
    assert "core-v0.10.0 is on a tree whose version is 0.9.1" in wrong
    assert "nobody-v1.0.0 names no distribution" in nothing


def test_the_op_of_the_page_is_another_vendors_and_imports_from_ours(tmp_path: Path) -> None:
    page = (envs.ROOT / "docs" / "new-op.md").read_text()
    release_check.write_op(page, tmp_path)
    assert release_check.project(tmp_path)["name"] == release_check.SOFTCAP
    modules = [path.read_text() for path in tmp_path.rglob("*.py")]
    (contract,) = [text for text in modules if release_check.IS_CONTRACT.search(text)]
    compile(contract, "the contract", "exec")
    assert "from vllm_fl.contracts.silu_and_mul import SPEC" in contract
    assert not [text for text in modules if "acme" in text]


def test_only_what_installs_ours_is_taken_from_a_readme() -> None:
    page = (
        "```\npip install vllm-fl-acme   # from the index\n```\n"
        "```sh\npip install nox && nox\nvllm-fl doctor\n"
        "pip install 'vllm-fl-acme[fast]' && pip install --no-deps fast\n```\n"
        "```toml\npip install vllm-fl-other\n```\n"
    )
    assert install_lines(page) == [
        "pip install vllm-fl-acme",
        "pip install 'vllm-fl-acme[fast]' && pip install --no-deps fast",
    ]


def test_the_index_serves_each_file_with_its_digest(tmp_path: Path) -> None:
    files = [
        tmp_path / "vllm_fl_acme-0.1.0.tar.gz",
        tmp_path / "vllm_fl_acme-0.1.0-py3-none-any.whl",
    ]
    for file in files:
        file.write_bytes(file.name.encode())
    with index(files, tmp_path / "index") as address:
        page = urllib.request.urlopen(f"{address}vllm-fl-acme/").read().decode()
        assert page.count("#sha256=") == 2
        served = urllib.request.urlopen(f"{address}vllm-fl-acme/{files[1].name}").read()
    assert served == files[1].read_bytes()


def test_a_wheel_without_the_licence_or_the_readme_is_not_released(tmp_path: Path) -> None:
    folder = tmp_path / "vllm-fl-reference"
    source = envs.distributions()["vllm-fl-reference"]
    for name in ("pyproject.toml", "README.md"):
        folder.mkdir(exist_ok=True)
        (folder / name).write_text((source / name).read_text())
    (folder / "LICENSE").write_text("Another one.\n")
    package = folder / "src" / "vllm_fl_reference"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    envs.build(folder, tmp_path / "out")
    files = sorted((tmp_path / "out").iterdir())
    with pytest.raises(SystemExit, match="licence of this repository"):
        look_into("vllm-fl-reference", folder, files)
    with pytest.raises(SystemExit, match="not vllm_fl_reference"):
        look_into("vllm-fl-reference", folder, files[:1])
    (folder / "LICENSE").write_text((envs.ROOT / "LICENSE").read_text())
    envs.build(folder, tmp_path / "good")
    good = sorted((tmp_path / "good").iterdir())
    look_into("vllm-fl-reference", folder, good)
    (folder / "README.md").write_text("# Another one\n")
    with pytest.raises(SystemExit, match="readme"):
        look_into("vllm-fl-reference", folder, good)


def test_a_build_that_depends_on_its_surroundings_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(folder: Path, out: Path, *options: str, **variables: str) -> None:
        out.mkdir(exist_ok=True)
        (out / "vllm_fl_acme-0.1.0.tar.gz").write_text(variables.get("TZ", "UTC"))

    monkeypatch.setattr(envs, "build", build)
    with pytest.raises(SystemExit, match="not built reproducibly"):
        release_check.build_twice(envs.distributions()["vllm-fl-core"], tmp_path / "out")
