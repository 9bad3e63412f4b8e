"""Entry points of installed distributions, including broken ones."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from vllm_fl.plugins.discovery import BACKENDS, CONTRACTS, discover
from vllm_fl.plugins.installed import entry_points, required_by


def install(
    root: Path,
    name: str = "fl-acme",
    version: str = "1.0",
    *,
    points: str = "[vllm_fl.plugin]\nacme = fl_acme.plugin\n",
    requires: tuple[str, ...] = (),
    is_whole: bool = True,
) -> Path:
    folder = root / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    if is_whole:
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
        text = "\n".join(["Metadata-Version: 2.1", *lines, "", "Requires-Dist: described\n"])
        (folder / "METADATA").write_text(text)
    (folder / "entry_points.txt").write_text(points)
    return folder


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_first_folder_on_the_path_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "behind")
    install(tmp_path / "before", version="2.0", points="[console_scripts]\nx = a:b\n")
    monkeypatch.syspath_prepend(tmp_path / "behind")
    assert "acme" in [p.name for p in entry_points(BACKENDS)]
    monkeypatch.syspath_prepend(tmp_path / "before")  # as after pip's upgrade: 2.0 has no plugin
    assert "acme" not in [p.name for p in entry_points(BACKENDS)]


def test_the_kind_and_the_requirements_of_a_distribution(site: Path) -> None:
    install(site, requires=("Fl.Acme_Ops>=1,<2", 'torch ; extra == "gpu"', "pluggy (>=1)"))
    install(site, "fl-acme-ops", points=f"[{CONTRACTS}]\nacme = fl_acme_ops.plugin\n")
    kinds = {each.owner.distribution: each.kind for each in discover()}
    assert (kinds["fl-acme"], kinds["fl-acme-ops"]) == ("backend", "contracts")
    assert required_by(distribution("fl-acme")) == {"fl-acme-ops", "torch", "pluggy"}


def test_broken_folders_cost_only_themselves(site: Path) -> None:
    install(site)
    install(site, "fl-gone", is_whole=False, points="[vllm_fl.plugin]\ngone = fl_gone\n")
    (install(site, "fl-bytes") / "entry_points.txt").write_bytes(b"[vllm_fl.plugin]\n\xff = a\n")
    (site / "fl_file-1.0.dist-info").write_text("no folder")
    (site / "fl_none-1.0.dist-info").mkdir()
    found = {f.owner.plugin: f for f in discover()}
    assert found["acme"].owner.distribution == "fl-acme"
    assert found["gone"].owner.distribution == "fl-gone"
    with pytest.raises(FileNotFoundError, match="half uninstalled"):
        found["gone"].load()


def test_a_start_imports_none_of_the_heavy_modules() -> None:
    code = (
        "from vllm_fl.dispatch import get_default_manager; "
        "get_default_manager().ensure_initialized(); import sys; "
        "heavy = 'torch vllm vllm_fl.engine.plan yaml'; "
        "print([m for m in heavy.split() if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],  # without site: no .pth file imports anything
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "VLLM_FL_PLUGINS": "",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
