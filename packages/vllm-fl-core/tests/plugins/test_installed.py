"""Entry points read in one pass: what importlib.metadata answers, and what it is for."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from vllm_fl.plugins.discovery import discover
from vllm_fl.plugins.installed import entry_points

GROUP = "vllm_fl.plugin"


def install(
    root: Path,
    name: str = "fl-acme",
    version: str = "1.0",
    *,
    points: str = "[vllm_fl.plugin]\nacme = fl_acme.plugin\n",
    metadata: str | None = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
    suffix: str = "dist-info",
) -> Path:
    folder = root / f"{name.replace('-', '_')}-{version}.{suffix}"
    folder.mkdir(parents=True)
    if metadata is not None:
        file = "METADATA" if suffix == "dist-info" else "PKG-INFO"
        (folder / file).write_text(metadata.format(name=name, version=version))
    (folder / "entry_points.txt").write_text(points)
    return folder


def facts(points: Any) -> list[tuple[Any, ...]]:
    return [(p.name, p.value, p.dist.name, p.dist.version) for p in points]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("group", ["pytest11", "console_scripts", GROUP, "vllm.general_plugins"])
def test_the_same_as_importlib_metadata_for_what_is_installed_here(group: str) -> None:
    ours = facts(entry_points(group))
    assert sorted(ours) == sorted(facts(importlib.metadata.entry_points(group=group)))


def test_odd_files_are_read_as_importlib_metadata_reads_them(site: Path) -> None:
    install(
        site,
        points="# vllm_fl.plugin\n[console_scripts]\nx = a:b\n\n[ vllm_fl.plugin ]\r\n"
        "  one = fl_acme.plugin : Plugin.register [extra]\n# two = no\ntwo=fl_acme\n\n"
        "[other]\ny = z\n",
        metadata="Metadata-Version: 2.1\nSummary: Name: no\nName:   fl-acme  \nVersion: 1.0\n"
        "\nName: of the description\n",
    )
    ours = [p for p in entry_points(GROUP) if p.dist.name == "fl-acme"]
    assert [(p.name, p.dist.version) for p in ours] == [("one", "1.0"), ("two", "1.0")]
    (site / "fl_acme").mkdir()
    (site / "fl_acme" / "__init__.py").write_text("")
    (site / "fl_acme" / "plugin.py").write_text("class Plugin:\n    register = 'it'\n")
    try:
        assert ours[0].load() == "it"
        assert ours[1].load() is sys.modules["fl_acme"]
    finally:
        for name in ("fl_acme", "fl_acme.plugin"):
            sys.modules.pop(name, None)


def test_the_first_folder_on_the_path_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "behind", version="1.0")
    install(tmp_path / "before", version="2.0", points="[console_scripts]\nx = a:b\n")
    monkeypatch.syspath_prepend(tmp_path / "behind")
    assert "acme" in [p.name for p in entry_points(GROUP)]
    monkeypatch.syspath_prepend(tmp_path / "before")  # as pip would have it: 2.0 has no plugin
    assert "acme" not in [p.name for p in entry_points(GROUP)]


def test_broken_folders_cost_only_themselves(site: Path) -> None:
    install(site)
    install(site, "fl-gone", metadata=None, points="[vllm_fl.plugin]\ngone = fl_gone\n")
    (install(site, "fl-bytes") / "entry_points.txt").write_bytes(b"[vllm_fl.plugin]\n\xff = a\n")
    (site / "fl_file-1.0.dist-info").write_text("no folder")
    (site / "fl_none-1.0.dist-info").mkdir()
    found = {f.owner.plugin: f for f in discover()}
    assert found["acme"].owner.distribution == "fl-acme"
    assert found["gone"].owner.distribution == "fl-gone"
    with pytest.raises(FileNotFoundError, match="half uninstalled"):
        found["gone"].load()


def test_an_archive_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "site.zip"
    with zipfile.ZipFile(archive, "w") as file:
        info = "fl_zipped-1.0.dist-info"
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: fl-zipped\nVersion: 1.0\n")
        file.writestr(f"{info}/entry_points.txt", "[vllm_fl.plugin]\nzipped = fl_zipped\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(archive)])
    assert "zipped" in [p.name for p in entry_points(GROUP)]


def test_a_start_imports_none_of_the_heavy_modules() -> None:
    code = (
        "from vllm_fl.dispatch import get_default_manager; "
        "get_default_manager().ensure_initialized(); import sys; "
        "heavy = 'torch importlib_metadata importlib.metadata email zipfile "
        "vllm_fl.engine.plan yaml'; print([m for m in heavy.split() if m in sys.modules])"
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
