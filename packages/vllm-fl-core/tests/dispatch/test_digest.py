"""The digest of a plan: the same plan has the same one, another plan or source another."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from vllm_fl.dispatch import OpManager, OpRegistry
from vllm_fl.dispatch.config import load_settings
from vllm_fl.dispatch.digest import digest, fingerprint
from vllm_fl.dispatch.plan import Plan, make_plan
from vllm_fl.dispatch.registry import Owner
from vllm_fl.dispatch.types import BackendImplKind, OpImpl

SOURCE = "def silu_and_mul(x):\n    return x[..., : x.shape[-1] // 2] {operator} 2\n"


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a module `digest_kernel` that can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "digest_kernel", raising=False)
    file = tmp_path / "digest_kernel.py"
    file.write_text(SOURCE.format(operator="*"))
    return file


def digest_of(module: ModuleType, mode: str = "eager", version: str = "1.0", **env: str) -> str:
    registry = OpRegistry()
    owner = Owner("acme", "fl-acme", version)
    impl = OpImpl(
        "silu_and_mul", "vendor.acme", BackendImplKind.VENDOR, module.silu_and_mul, "acme"
    )
    registry.register_many([impl], owner)
    plan: Plan = make_plan(OpManager(registry), mode, load_settings(env))  # type: ignore[arg-type]
    return digest(fingerprint(plan, registry.snapshot().owners))


def test_the_same_plan_has_the_same_digest_in_another_process(kernel: Path) -> None:
    module = importlib.import_module("digest_kernel")
    here = digest_of(module)
    assert digest_of(module) == here
    code = (
        f"import sys, json; sys.path[:0] = {[str(kernel.parent), str(Path(__file__).parent)]!r}\n"
        "import digest_kernel, test_digest\n"
        "print(json.dumps(test_digest.digest_of(digest_kernel)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == here


def test_what_changes_the_plan_changes_the_digest(kernel: Path) -> None:
    module = importlib.import_module("digest_kernel")
    digests = {
        digest_of(module),
        digest_of(module, "compiled"),
        digest_of(module, version="1.1"),
        digest_of(module, VLLM_FL_STRICT="1"),
        digest_of(module, VLLM_FL_DENY_VENDORS="acme"),
    }
    assert len(digests) == 5


def test_what_does_not_change_the_plan_does_not_change_the_digest(kernel: Path) -> None:
    module = importlib.import_module("digest_kernel")
    same = {digest_of(module), digest_of(module, VLLM_FL_LOG_LEVEL="DEBUG")}
    same.add(digest_of(module, VLLM_FL_DISPATCH_DEBUG="1"))
    same.add(digest_of(module, VLLM_FL_PREFER="vendor"))  # the same choice, for another reason
    assert len(same) == 1


def test_an_edited_implementation_has_another_digest(kernel: Path) -> None:
    before = digest_of(importlib.import_module("digest_kernel"))
    edited = kernel.with_name("edited").joinpath(kernel.name)
    edited.parent.mkdir()
    edited.write_text(SOURCE.format(operator="+"))
    sys.modules.pop("digest_kernel")
    sys.path.insert(0, str(edited.parent))
    try:
        assert digest_of(importlib.import_module("digest_kernel")) != before
    finally:
        sys.path.remove(str(edited.parent))
