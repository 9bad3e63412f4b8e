"""The digest of a plan: equal plans have equal digests; another plan or source changes it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vllm_fl.dispatch import OpManager, OpRegistry
from vllm_fl.engine import digest as digest_module
from vllm_fl.engine.digest import UNKNOWN, _code_of, code_hash, digest, fingerprint
from vllm_fl.engine.facts import EngineFacts
from vllm_fl.engine.plan import Plan, make_plan
from vllm_fl.plugins.plugin import Owner, Plugin
from vllm_fl.plugins.setting import SettingSpec
from vllm_fl.plugins.types import BackendImplKind, OpImpl
from vllm_fl.settings.loading import load_settings

SOURCE = "def silu_and_mul(x):\n    return x[..., : x.shape[-1] // 2] {operator} 2\n"


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File of an importable module `digest_kernel`."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "digest_kernel", raising=False)
    file = tmp_path / "digest_kernel.py"
    file.write_text(SOURCE.format(operator="*"))
    return file


def digest_of(module: ModuleType, *how: Any, **env: Any) -> str:
    return digest(fingerprint(*plan_of(module, *how, **env)))


def plan_of(
    module: ModuleType,
    mode: Any = "eager",
    version: str = "1.0",
    owner: Owner | None = None,
    **env: str,
) -> tuple[Plan, Mapping[tuple[str, str], Owner]]:
    registry, vendor = OpRegistry(), BackendImplKind.VENDOR
    impl = OpImpl("silu_and_mul", "vendor.acme", vendor, module.silu_and_mul, "acme")
    registry.register_many([impl], owner or Owner("acme", "fl-acme", version))
    plan = make_plan(OpManager(registry), EngineFacts(load_settings(env), mode))
    return plan, registry.snapshot().owners


def test_the_same_plan_has_the_same_digest_in_another_process(kernel: Path) -> None:
    module = importlib.import_module("digest_kernel")
    here = digest_of(module)
    assert digest_of(module) == here
    paths = [str(kernel.parent), str(Path(__file__).parent), *sys.path]
    code = (
        f"import sys, json; sys.path[:0] = {paths!r}\n"
        "import digest_kernel, test_digest\n"
        "print(json.dumps(test_digest.digest_of(digest_kernel)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == here


def test_what_changes_the_plan_changes_the_digest_and_nothing_else_does(kernel: Path) -> None:
    module = importlib.import_module("digest_kernel")
    digests = {
        digest_of(module),
        digest_of(module, "compiled"),
        digest_of(module, version="1.1"),
        digest_of(module, VLLM_FL_STRICT="1"),
        digest_of(module, VLLM_FL_DENY_VENDORS="acme"),
    }
    assert len(digests) == 5
    same = {digest_of(module), digest_of(module, VLLM_FL_LOG_LEVEL="DEBUG")}
    same.add(digest_of(module, VLLM_FL_DISPATCH_DEBUG="1"))
    same.add(digest_of(module, VLLM_FL_PREFER="vendor"))  # the same plan for another reason
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


class TestCode:
    """A distribution with a RECORD, as pip installs it."""

    @pytest.fixture
    def site(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        site = tmp_path / "site"
        package = site / "acme_kernels"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("from .helper import FACTOR\n")
        (package / "helper.py").write_text("FACTOR = 1\n")
        (package / "lib.so").write_bytes(b"\x7fELF one")
        (package / "__pycache__").mkdir()
        (package / "__pycache__" / "__init__.cpython-311.pyc").write_bytes(b"byte code")
        info = site / "acme_kernels-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-kernels\nVersion: 1.0\n")
        self.record(site)
        monkeypatch.syspath_prepend(str(site))
        _code_of.cache_clear()
        return site

    @staticmethod
    def record(site: Path) -> None:
        files = [p.relative_to(site).as_posix() for p in site.rglob("*") if p.is_file()]
        rows = [f"{name},sha256=x,1" for name in sorted(files)]
        (site / "acme_kernels-1.0.dist-info" / "RECORD").write_text("\n".join(rows) + "\n")

    @staticmethod
    def code() -> str:
        _code_of.cache_clear()
        return code_hash("acme-kernels", "acme_kernels")

    @pytest.mark.parametrize(
        ("file", "content"),
        [("helper.py", b"FACTOR = 2\n"), ("lib.so", b"\x7fELF two"), ("__init__.py", b"")],
    )
    def test_every_file_counts(self, site: Path, file: str, content: bytes) -> None:
        before = self.code()
        assert len(before) == 16 and self.code() == before
        (site / "acme_kernels" / file).write_bytes(content)
        assert self.code() != before

    def test_byte_code_and_metadata_do_not(self, site: Path) -> None:
        before = self.code()
        cached = site / "acme_kernels" / "__pycache__" / "__init__.cpython-311.pyc"
        cached.write_bytes(b"other byte code")
        (site / "acme_kernels" / "helper.pyc").write_bytes(b"beside its source, it is never read")
        (site / "acme_kernels-1.0.dist-info" / "INSTALLER").write_text("pip")
        self.record(site)
        assert self.code() == before

    def test_links_and_hidden_folders_count_but_those_of_git(
        self, site: Path, tmp_path: Path
    ) -> None:
        package = site / "acme_kernels"
        (tmp_path / "kernels").mkdir()
        (package / "linked").symlink_to(tmp_path / "kernels", target_is_directory=True)
        (tmp_path / "kernels" / "round").symlink_to(package, target_is_directory=True)
        for name in (".kernels", ".git", "linked"):
            (package / name).mkdir(exist_ok=True)
            (package / name / "fast.py").write_text("one\n")
        before = self.code()
        (package / ".git" / "fast.py").write_text("two\n")
        assert self.code() == before
        for name in (".kernels", "linked"):
            (package / name / "fast.py").write_text("two\n")
            assert self.code() != before
            before = self.code()

    def test_a_change_in_the_middle_of_a_large_library(self, site: Path) -> None:
        library = site / "acme_kernels" / "lib.so"
        library.write_bytes(bytes(9 * 2**20))
        before, status = self.code(), library.stat()
        with library.open("r+b") as file:
            file.seek(5 * 2**20)
            file.write(b"1")
        os.utime(library, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert self.code() != before

    def test_the_kernels_that_a_plugin_declares_are_in_the_plans_digest(
        self, site: Path, kernel: Path
    ) -> None:
        module = importlib.import_module("digest_kernel")
        owner = Owner("acme", "fl-acme", "1.0", kernels=("acme-kernels",))
        before = digest_of(module, owner=owner)
        assert before != digest_of(module)
        (site / "acme_kernels" / "helper.py").write_text("FACTOR = 2\n")
        _code_of.cache_clear()
        assert digest_of(module, owner=owner) != before


def test_settings_that_a_planned_plugin_declares_count(kernel: Path, tmp_path: Path) -> None:
    """Compiled code contains the values that the plugin's code reads."""
    fast = SettingSpec("vendor_acme_fast", "ACME_FAST", False, in_file=True)
    file = tmp_path / "fl.yaml"
    file.write_text("vendor_acme_fast: false\n")
    plan, owners = plan_of(importlib.import_module("digest_kernel"))
    owner = Owner("acme", "fl-acme", "1.0")

    def planned_digest(planned: bool = True, **env: str) -> str:
        who = owner if planned else Owner("other")
        plugin = Plugin(who, "acme.plugin", status="ok", settings=(fast,))
        settings = load_settings(env, plugins=(fast,))
        return digest(fingerprint(plan, owners, settings=settings, plugins=(plugin,)))

    assert planned_digest() == planned_digest(ACME_FAST="0") != planned_digest(ACME_FAST="1")
    assert planned_digest(False) == planned_digest(False, ACME_FAST="1")
    # The file's value applies, but the code may have read the variable directly.
    overridden = {planned_digest(VLLM_FL_CONFIG=str(file), ACME_FAST=text) for text in "01"}
    assert len(overridden) == 2


def test_a_function_of_torchs_is_known_by_the_module_that_brings_it(kernel: Path) -> None:
    torch = pytest.importorskip("torch")
    impl = OpImpl("silu_and_mul", "vendor.x", BackendImplKind.VENDOR, torch.nn.functional.silu, "x")
    facts = digest_module._candidate(impl, Owner(plugin=kernel.stem))
    assert facts["source"] == code_hash(None, kernel.stem) != UNKNOWN
