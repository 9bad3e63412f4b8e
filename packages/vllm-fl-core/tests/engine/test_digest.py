"""The digest of a plan: the same plan has the same one, another plan or source another."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

from vllm_fl.dispatch import OpManager, OpRegistry
from vllm_fl.engine import digest as digest_module
from vllm_fl.engine.digest import UNKNOWN, _code_of, code_of, digest, fingerprint
from vllm_fl.engine.facts import EngineFacts
from vllm_fl.engine.plan import Plan, make_plan
from vllm_fl.plugins.plugin import Plugin
from vllm_fl.plugins.registry import Owner
from vllm_fl.plugins.types import BackendImplKind, OpImpl, SettingSpec
from vllm_fl.settings.loading import load_settings

SOURCE = "def silu_and_mul(x):\n    return x[..., : x.shape[-1] // 2] {operator} 2\n"


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a module `digest_kernel` that can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "digest_kernel", raising=False)
    file = tmp_path / "digest_kernel.py"
    file.write_text(SOURCE.format(operator="*"))
    return file


def digest_of(
    module: ModuleType,
    mode: str = "eager",
    version: str = "1.0",
    owner: Owner | None = None,
    **env: str,
) -> str:
    return digest(fingerprint(*plan_of(module, mode, version, owner, **env)))


def plan_of(
    module: ModuleType,
    mode: str = "eager",
    version: str = "1.0",
    owner: Owner | None = None,
    **env: str,
) -> tuple[Plan, Mapping[tuple[str, str], Owner]]:
    registry = OpRegistry()
    owner = owner or Owner("acme", "fl-acme", version)
    impl = OpImpl(
        "silu_and_mul", "vendor.acme", BackendImplKind.VENDOR, module.silu_and_mul, "acme"
    )
    registry.register_many([impl], owner)
    facts = EngineFacts(load_settings(env), mode)  # type: ignore[arg-type]
    plan: Plan = make_plan(OpManager(registry), facts)
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


class TestCode:
    """A distribution that is installed by its RECORD, as pip writes it."""

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
    def record(site: Path, **known: str) -> None:
        files = [p.relative_to(site).as_posix() for p in site.rglob("*") if p.is_file()]
        rows = [f"{name},{known.get(Path(name).stem, 'sha256=x')},1" for name in sorted(files)]
        (site / "acme_kernels-1.0.dist-info" / "RECORD").write_text("\n".join(rows) + "\n")

    @staticmethod
    def code() -> str:
        _code_of.cache_clear()
        return code_of("acme-kernels", "acme_kernels")

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

    def test_the_same_code_elsewhere_is_the_same(self, site: Path, tmp_path: Path) -> None:
        before = self.code()
        other = tmp_path / "other"
        shutil.copytree(site, other)
        sys.path.remove(str(site))
        sys.path.insert(0, str(other))
        try:
            assert self.code() == before
        finally:
            sys.path.remove(str(other))
            sys.path.insert(0, str(site))

    def test_a_large_file_is_known_by_its_record(
        self, site: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(digest_module, "LARGE", 4)
        self.record(site, lib="sha256=one")
        before = self.code()
        (site / "acme_kernels" / "lib.so").write_bytes(b"\x7fELF two")
        assert self.code() == before
        self.record(site, lib="sha256=two")
        assert self.code() != before

    def test_a_link_to_sources_is_walked(self, site: Path) -> None:
        self.link(site, site)
        before = self.code()
        (site / "acme_kernels" / "new.txt").write_text("x = 1\n")  # not in RECORD
        assert self.code() != before

    @staticmethod
    def link(site: Path, project: Path) -> None:
        url = site / "acme_kernels-1.0.dist-info" / "direct_url.json"
        url.write_text(json.dumps({"url": project.as_uri(), "dir_info": {"editable": True}}))

    @pytest.mark.parametrize(
        ("file", "text"),
        [
            ("_acme.pth", "{project}\nimport nothing\n"),
            ("__editable___acme_finder.py", "MAPPING = {{'acme_fast': '{project}/acme_fast'}}\n"),
            ("_editable_impl_acme.py", 'F.map_module("acme_fast", "{project}/acme_fast")\n'),
            ("_acme_editable_loader.py", "install({{'acme_fast.inner': '…'}}, {{'os', 'sys'}})\n"),
        ],
    )
    def test_every_top_level_name_behind_a_link_to_sources_counts(
        self,
        site: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        file: str,
        text: str,
    ) -> None:
        project = tmp_path / "project"
        (project / "acme_fast").mkdir(parents=True)
        (project / "acme_fast" / "__init__.py").write_text("FACTOR = 1\n")
        (site / file).write_text(text.format(project=project))
        self.record(site)
        self.link(site, project)
        monkeypatch.syspath_prepend(str(project))
        before = self.code()
        (project / "acme_fast" / "__init__.py").write_text("FACTOR = 2\n")
        assert self.code() != before

    @pytest.mark.parametrize("recorded", [True, False])
    @pytest.mark.parametrize("typed", [True, False])
    def test_byte_code_without_source_counts_whenever_it_was_made(
        self, site: Path, recorded: bool, typed: bool
    ) -> None:
        package, seen = site / "acme_kernels", []
        for file in package.iterdir():
            if file.is_file():
                file.unlink()
        if typed:
            (package / "py.typed").touch()
        for header, body in ((b"1", b"one"), (b"2", b"one"), (b"3", b"two")):
            (package / "__init__.pyc").write_bytes(header * 16 + body)
            self.record(site)
            if not recorded:
                (site / "acme_kernels-1.0.dist-info" / "RECORD").unlink()
            seen.append(self.code())
        assert seen[0] == seen[1] != seen[2] and UNKNOWN not in seen

    def test_files_outside_of_the_packages_count_but_scripts(self, site: Path) -> None:
        outside = site.parent / "share" / "acme" / "kernels.cl"
        script = site.parent / "bin" / "acme"
        for file in (outside, script):
            file.parent.mkdir(parents=True)
            file.write_text("one\n")
        self.record(site)
        with open(site / "acme_kernels-1.0.dist-info" / "RECORD", "a") as record:
            record.write("../share/acme/kernels.cl,sha256=x,1\n../bin/acme,sha256=x,1\n")
        before = self.code()
        script.write_text("#!/another/python\n")
        assert self.code() == before
        outside.write_text("two\n")
        assert self.code() != before

    @pytest.mark.parametrize("recorded", ["all", "the link", "none"])
    def test_folders_that_are_links_count(self, site: Path, tmp_path: Path, recorded: str) -> None:
        kernels = tmp_path / "kernels"
        kernels.mkdir()
        (kernels / "fast.cl").write_text("one\n")
        (kernels / "round").symlink_to(site / "acme_kernels", target_is_directory=True)
        (site / "acme_kernels" / "linked").symlink_to(kernels, target_is_directory=True)
        self.record(site)
        info = site / "acme_kernels-1.0.dist-info" / "RECORD"
        if recorded == "the link":
            info.write_text(info.read_text() + "acme_kernels/linked,,\n")
        elif recorded == "none":
            info.unlink()
        before = self.code()
        (kernels / "fast.cl").write_text("two\n")
        assert self.code() != before

    @pytest.mark.parametrize("recorded", [True, False])
    def test_hidden_folders_count_but_those_of_tools(self, site: Path, recorded: bool) -> None:
        for name in (".kernels", ".git"):
            (site / "acme_kernels" / name).mkdir()
            (site / "acme_kernels" / name / "fast.py").write_text("one\n")
        if not recorded:
            (site / "acme_kernels-1.0.dist-info" / "RECORD").unlink()
        before = self.code()
        (site / "acme_kernels" / ".git" / "fast.py").write_text("two\n")
        assert self.code() == before
        (site / "acme_kernels" / ".kernels" / "fast.py").write_text("two\n")
        assert self.code() != before

    def test_modules_that_were_built_after_the_installation_count(self, site: Path) -> None:
        """What else a package leaves in its folder, as a log, would make each start another one."""
        before = self.code()
        (site / "acme_kernels" / "run.log").write_text("started\n")
        assert self.code() == before
        (site / "acme_kernels" / "built").mkdir()
        (site / "acme_kernels" / "built" / "fast.abi3.so").write_bytes(b"\x7fELF three")
        assert self.code() != before

    def test_what_is_imported_from_elsewhere_counts(
        self, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = self.code()
        shutil.copytree(site / "acme_kernels", tmp_path / "first" / "acme_kernels")
        (tmp_path / "first" / "acme_kernels" / "helper.py").write_text("FACTOR = 2\n")
        monkeypatch.syspath_prepend(str(tmp_path / "first"))
        assert self.code() != before

    def test_an_archive_counts_by_its_content(
        self, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delitem(sys.modules, "acme_kernels", raising=False)
        sys.path.remove(str(site))
        archive = tmp_path / "acme.zip"
        seen = set()
        for factor in "12":
            (site / "acme_kernels" / "helper.py").write_text(f"FACTOR = {factor}\n")
            archive.unlink(missing_ok=True)
            with zipfile.ZipFile(archive, "w") as made:
                for path in sorted(site.rglob("*")):
                    made.write(path, path.relative_to(site))
            sys.path.insert(0, str(archive))
            importlib.invalidate_caches()
            try:
                seen.add(self.code())
            finally:
                sys.path.remove(str(archive))
        sys.path.insert(0, str(site))
        assert len(seen) == 2 and UNKNOWN not in seen

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

    def test_what_computes_beneath_is_in_it_by_version(self, kernel: Path) -> None:
        module = importlib.import_module("digest_kernel")
        facts = fingerprint(*plan_of(module))
        assert facts["versions"]["torch"] and facts["versions"]["vllm-fl-core"]


def test_settings_that_a_planned_plugin_declares_count(kernel: Path, tmp_path: Path) -> None:
    """A compiler makes what code reads of them a part of what it compiles."""
    fast = SettingSpec("vendor_acme_fast", "ACME_FAST", False, in_file=True)
    file = tmp_path / "fl.yaml"
    file.write_text("vendor_acme_fast: false\n")
    plan, owners = plan_of(importlib.import_module("digest_kernel"))
    owner = Owner("acme", "fl-acme", "1.0")

    def told(planned: bool = True, **env: str) -> str:
        who = owner if planned else Owner("other")
        plugin = Plugin(who, "acme.plugin", "ok", settings=(fast,))
        settings = load_settings(env, plugins=(fast,))
        return digest(fingerprint(plan, owners, settings=settings, plugins=(plugin,)))

    assert told() == told(ACME_FAST="0") != told(ACME_FAST="1")
    assert told(False) == told(False, ACME_FAST="1")
    # The file's value holds, and the code may have read the variable all the same.
    overridden = {told(VLLM_FL_CONFIG=str(file), ACME_FAST=text) for text in "01"}
    assert len(overridden) == 2


def test_what_computes_beneath_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(digest_module, "_walked", lambda top, *_: read.append(top) or iter(()))
    _code_of.cache_clear()
    assert code_of(None, "torch.nn.functional") == UNKNOWN
    assert read == []


def test_a_function_of_torchs_is_known_by_the_module_that_brings_it(kernel: Path) -> None:
    torch = pytest.importorskip("torch")
    impl = OpImpl("silu_and_mul", "vendor.x", BackendImplKind.VENDOR, torch.nn.functional.silu, "x")
    facts = digest_module._candidate(impl, Owner(plugin=kernel.stem))
    assert facts["source"] == code_of(None, kernel.stem) != UNKNOWN
