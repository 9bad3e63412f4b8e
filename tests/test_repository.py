"""Rules for every distribution and file of this repository."""

from __future__ import annotations

import configparser
import email
import re
import shutil
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest
import release_check
import yaml

import envs
from installed import Install

DISTRIBUTIONS = envs.distributions()
REPOSITORY = "https://github.com/flagos-ai/vllm-fl"
META, CORE, OPS = "vllm-fl", "vllm-fl-core", "vllm-fl-ops"
TOOLS, VERIFY = "vllm-fl-tools", "vllm-fl-verify"
COMMON = {META, CORE, OPS, TOOLS, VERIFY}
BACKENDS = {name: path for name, path in DISTRIBUTIONS.items() if name not in COMMON}
OF_EVERY_BACKEND = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "tests")
OF_EVERY_MODULE = (
    *("__init__.py", "plugin.py", "py.typed"),
    *(f"impl/{name}.py" for name in ("__init__", "activation", "normalization", "rotary")),
)
WITHOUT_OPS = {"vllm-fl-flagcx"}
"""Distributions without operators and operator modules."""


def import_name(distribution: str) -> str:
    return "vllm_fl" if distribution == CORE else distribution.replace("-", "_")


def test_the_distributions_are_all_there() -> None:
    backends = {"ascend", "cpu", "cuda", "flagcx", "flaggems", "reference"}
    assert set(DISTRIBUTIONS) == COMMON | {f"vllm-fl-{name}" for name in backends}


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_has_the_same_skeleton(name: str) -> None:
    folder = BACKENDS[name]
    wanted = [folder / file for file in OF_EVERY_BACKEND]
    modules = (
        file for file in OF_EVERY_MODULE if name not in WITHOUT_OPS or not file.startswith("impl/")
    )
    wanted += [folder / "src" / import_name(name) / file for file in modules]
    assert not [str(file.relative_to(folder)) for file in wanted if not file.exists()]
    assert list((folder / "tests").glob("test_*.py"))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_wheel_says_what_it_is(name: str) -> None:
    folder = DISTRIBUTIONS[name]
    version = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["version"]
    with zipfile.ZipFile(envs.wheel(folder)) as wheel:
        files = wheel.namelist()
        (info,) = {file.partition("/")[0] for file in files if ".dist-info/" in file}
        metadata = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
        licence = wheel.read(f"{info}/licenses/LICENSE").decode()
    assert metadata["Name"] == name
    assert metadata["Version"] == version
    assert metadata["License-Expression"] == "Apache-2.0"
    assert licence == (envs.ROOT / "LICENSE").read_text()
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Author"] == "The vllm-fl authors"
    urls = dict(url.split(", ", 1) for url in metadata.get_all("Project-URL", []))
    assert set(urls) == {"Documentation", "Source", "Issues", "Changelog"}
    assert {url.removeprefix(REPOSITORY)[:1] for url in urls.values()} <= {"", "/", "#"}
    for url in urls.values():  # each URL leads to a file or folder of this repository
        path = re.sub(r"^/(blob|tree)/main/|#.*|/issues$", "", url.removeprefix(REPOSITORY))
        assert (envs.ROOT / path).exists(), url
    assert urls["Changelog"].endswith(f"/{folder.relative_to(envs.ROOT)}/CHANGELOG.md")
    assert metadata.get_payload()  # the README
    if name == META:
        assert {file.partition("/")[0] for file in files} == {info}
        return
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert f"{import_name(name)}/py.typed" in files
    assert {file.partition("/")[0] for file in files} == {import_name(name), info}


def test_versions_changelogs_and_dependencies_agree() -> None:
    assert list(release_check.inconsistencies(DISTRIBUTIONS, {})) == []


def required(name: str) -> set[str]:
    """The distributions of this repository that `name` requires."""
    found = release_check.project(DISTRIBUTIONS[name])["dependencies"]
    return {re.split("[=<>]", each)[0] for each in found} & {*DISTRIBUTIONS}


def test_distributions_require_what_they_are_built_on() -> None:
    assert required(CORE) == set()
    assert required(OPS) == required(VERIFY) == {CORE}
    assert required(TOOLS) == {CORE, OPS, VERIFY}
    assert required(META) == {CORE, OPS, VERIFY, TOOLS, "vllm-fl-reference"}
    for name in BACKENDS:
        assert required(name) == {CORE, VERIFY} | (set() if name in WITHOUT_OPS else {OPS})


def test_a_new_backend_requires_what_ours_do() -> None:
    template = DISTRIBUTIONS[TOOLS] / "src" / "vllm_fl_tools" / "templates" / "backend"
    ours = DISTRIBUTIONS["vllm-fl-reference"]
    asked = release_check.project(template)["dependencies"]
    assert asked == release_check.project(ours)["dependencies"]


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_every_readme_says_how_to_install_it(name: str) -> None:
    (first, *_) = release_check.install_lines((DISTRIBUTIONS[name] / "README.md").read_text())
    assert name in first


def test_the_python_classifiers_are_the_pythons_that_are_tested() -> None:
    for folder in DISTRIBUTIONS.values():
        text = (folder / "pyproject.toml").read_text()
        said = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
        assert said == list(envs.PYTHONS), folder.name


def test_the_publishing_job_knows_every_distribution() -> None:
    workflow = (envs.ROOT / ".github" / "workflows" / "publish.yml").read_text()
    published = re.findall(r'^      - "([\w-]+)-v\*"$', workflow, re.M)
    ours = [name for name, path in DISTRIBUTIONS.items() if path.parent.name == "packages"]
    assert sorted(published) == sorted(ours)  # no example


def test_core_and_ops_are_forbidden_to_import_every_other_distribution() -> None:
    config = configparser.ConfigParser()
    config.read(envs.ROOT / ".importlinter")
    ours = {import_name(name) for name in DISTRIBUTIONS if name != META}
    for contract, may in {
        "core-alone": {"vllm_fl"},
        "ops-on-core": {"vllm_fl", "vllm_fl_ops"},
        "verify-on-core": {"vllm_fl", "vllm_fl_ops", "vllm_fl_verify"},
    }.items():
        forbidden = config[f"importlinter:contract:{contract}"]["forbidden_modules"].split()
        assert set(forbidden) == ours - may


WORKFLOWS = sorted((envs.ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("workflow", ["ci", "nightly", "weekly"])
def test_workflows_run_the_sessions_of_the_noxfile(workflow: str) -> None:
    source = (envs.ROOT / "noxfile.py").read_text()
    defined = re.findall(r'^@timed\("([\w-]+)"(, default=False)?', source, re.M)
    (nightly,) = re.findall(r"^NIGHTLY = (\(.*?^\))$", source, re.M | re.S)
    path = envs.ROOT / ".github" / "workflows" / f"{workflow}.yml"
    chosen = yaml.safe_load(path.read_text())["jobs"]["nox"]["strategy"]["matrix"]["session"]
    assert {name.partition("(")[0] for name in chosen} <= {name for name, _ in defined}
    if workflow == "ci":
        assert chosen == [name for name, skipped in defined if not skipped]
    if workflow == "nightly":
        assert tuple(chosen) == eval(nightly, {})  # a literal, but for its stars


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_to_a_commit_of_a_release(workflow: Path) -> None:
    uses = re.findall(r"uses: (.*)", workflow.read_text())
    assert uses
    pinned = re.compile(r"[\w-]+/[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
    assert [action for action in uses if not pinned.fullmatch(action)] == []


@pytest.mark.slow
def test_a_plain_pytest_collects_and_says_what_it_leaves_out(install: Install) -> None:
    done = install(engine=True).env.run("-m", "pytest", "--collect-only", "-q", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in BACKENDS:
        assert f": {name} is not installed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
def test_what_a_session_names_is_never_skipped(install: Install, name: str) -> None:
    tests = str(DISTRIBUTIONS[name] / "tests")
    done = install(engine=True).env.run("-m", "pytest", "-q", tests, check=False)
    assert done.returncode in (2, 4), done.stdout + done.stderr  # an error while collecting
    assert "SKIPPED" not in done.stdout


# Spelled so that this file does not match its own patterns.
MACHINE_PATH = re.compile(r"(?<![\w.~$}/-])/(?:home|root|Users|work|farm|mnt)/\w")
HOSTS = ("py pi", "python hosted", r"test\.py pi", r"download\.py torch")
REGISTRY = re.compile(rf"(?:{'|'.join(HOSTS).replace(' ', '')})\.(?:org|io)")


def tracked_files() -> list[Path]:
    """Files known to git or not ignored by it."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=envs.ROOT, capture_output=True, text=True, check=True)
    return [envs.ROOT / name for name in listed.stdout.split("\0") if name]


def test_no_file_names_a_machine_s_path_or_a_registry_s_address() -> None:
    files = [path for path in tracked_files() if path.is_file()]
    assert len(files) > 50
    found = []
    for path in files:
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if MACHINE_PATH.search(line) or REGISTRY.search(line):
                found.append(f"{path.relative_to(envs.ROOT)}:{number}: {line.strip()}")
    assert found == []


OWN_FOLDERS = {
    "_list_parts.py": "an answer in such a folder",
    "_engines.py": "a log in a folder that no one else may enter",
    "_parts.py": "settings in such a folder",
    "engine.py": "a model in such a folder",
    "_lock.py": "a draft in such a folder",
    "new.py": "a package in such a folder",
}
"""Modules that write only to folders without a risk of symlinks."""

IN_A_MODE_TO_WRITE = re.compile(
    r"""write_(?:text|bytes)\(|open\(.*["'][waxr]b?\+|open\(.*["'][wax]b?["']"""
)


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_the_files_that_a_page_names_exist(page: str) -> None:
    files = [f"/{path.relative_to(envs.ROOT)}" for path in tracked_files()]
    named = re.findall(
        r"[\w./-]+\.(?:md|py|toml|yaml|yml)\b", (envs.ROOT / page).read_text("utf-8")
    )
    real = [name for name in named if not re.search(r"KIND|MODULE|NAME|/OP\.", name)]
    assert not [name for name in real if not any(file.endswith(f"/{name}") for file in files)]


def test_every_file_is_written_in_one_way() -> None:
    """`vllm_fl_tools.atomic_write` follows no link, and writes whole files."""
    found = {
        path.name
        for folder in DISTRIBUTIONS.values()
        for path in (folder / "src").rglob("*.py")
        if IN_A_MODE_TO_WRITE.search(path.read_text("utf-8")) and path.name not in OWN_FOLDERS
    }
    # these write to an open descriptor
    assert found == {"atomic_write.py", "aten.py", "verdicts.py", "workload.py"}


def test_no_room_of_core_imports_one_above_it_or_another_distribution(tmp_path: Path) -> None:
    """`.importlinter` passes, and detects an import upwards, out of core, or in a circle."""
    sources = tmp_path / "src"
    for each in envs.ROOT.glob("packages/*/src"):
        shutil.copytree(each, sources, dirs_exist_ok=True)
    tools = envs.tools()

    def lint() -> subprocess.CompletedProcess[str]:
        return tools.run(*envs.LINT_IMPORTS, check=False, PYTHONPATH=str(sources))

    assert lint().returncode == 0, lint().stdout
    for room, line in {
        "vllm_fl/contracts/spec.py": "from ..plugins.types import OpImpl",
        "vllm_fl/plugins/types.py": "from ..settings.policy import Selector",
        "vllm_fl/engine/plan.py": "from ..integration import compat",
        "vllm_fl/integration/worker.py": "def late():\n    from vllm_fl_verify import run",
        "vllm_fl_verify/run.py": "import vllm_fl_tools.cli.tune",
        "vllm_fl/integration/planning.py": "from vllm_fl_reference.plugin import OPS",
        "vllm_fl/contracts/__init__.py": "def late():\n    import vllm_fl_ops",
        "vllm_fl_ops/plugin.py": "def late():\n    import vllm_fl_flaggems",
        "vllm_fl_ops/bindings/linear.py": "from vllm_fl.integration import graphs",
        "vllm_fl_ops/contracts/rms_norm.py": "from ..bindings.rms_norm import BINDING",
        "vllm_fl_cuda/impl/linear.py": "def late():\n    from .. import plugin",
    }.items():
        module = sources / room
        before = module.read_text()
        module.write_text(f"{before}\n\n{line}\n")
        done = lint()
        assert done.returncode == 1 and "BROKEN" in done.stdout, room
        module.write_text(before)
