"""What a plain `pytest` at the root leaves out, each with its reason.

A folder of tests whose distribution is not installed is skipped when pytest comes upon it by
itself. A folder or file that is named on the command line is never skipped, as every nox session
names its own: what is missing there is an error.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent
WITHOUT_KIT = ("vllm-fl-core", "vllm-fl-verify")

# No example has a deadline: how long one takes says how busy the machine is.
settings.register_profile("daily", deadline=None, max_examples=30)
settings.register_profile("nightly", deadline=None, max_examples=1000)
settings.load_profile("daily")


# Verdicts that other runs have kept must not change the verification in a test. The caches of
# compilers and models stay where they are.
before = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
os.environ.setdefault("VLLM_CACHE_ROOT", f"{before}/vllm")
os.environ.setdefault("HF_HOME", f"{before}/huggingface")
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)


class LeftOut(pytest.Collector):
    """A folder of tests that cannot run here. It is no Directory: its conftest is not imported."""

    reason: str

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        pytest.skip(self.reason)


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    reason = None if parent.session.isinitpath(path, with_parents=True) else reason_against(path)
    if reason is None:
        return None  # pytest's own way
    left_out = LeftOut.from_parent(parent, name=path.name, path=path)
    left_out.reason = reason
    return left_out


def reason_against(path: Path) -> str | None:
    """Why the tests in this folder cannot run in this environment, and what to do; or None."""
    folder = path.relative_to(ROOT)
    match folder.parts:
        case ("packages" | "examples", distribution, "tests"):
            if not is_installed(distribution):
                return f"{distribution} is not installed: pip install -e {folder.parent}"
            if distribution not in WITHOUT_KIT and not is_installed("vllm-fl-tools"):
                return "the kit is not installed: pip install -e packages/vllm-fl-tools"
            if find_spec("torch") is None:
                return "torch is not installed"
            if distribution == "vllm-fl-ascend":
                return f"they emulate torch_npu in the whole process; name them: pytest {folder}"
        case ("tests", "engine" | "nodes" | "real"):
            if find_spec("vllm") is None:
                return "vLLM is not installed"
            for name in ("core", "verify", "tools", "cpu", "reference"):
                if not is_installed(f"vllm-fl-{name}"):
                    return f"vllm-fl-{name} is not installed"
            if path.name == "nodes" and find_spec("ray") is None:
                return "Ray is not installed"
            if path.name == "real" and not (ROOT / "build/models/SmolLM2-135M-Instruct").is_dir():
                return "no real model is here: nox -s real fetches them"
    return None


def is_installed(distribution: str) -> bool:
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False
