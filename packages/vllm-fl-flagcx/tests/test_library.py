"""FLAGCX_PATH and its contents: one line explains why they cannot be used."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from flagcx_library import built

from vllm_fl import CommunicatorRequest
from vllm_fl_flagcx import library, plugin
from vllm_fl_flagcx.library import FlagcxError, LibraryError


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_loaded", {})


def asking(folder: object, device: str = "npu") -> CommunicatorRequest:
    return CommunicatorRequest(SimpleNamespace(flagcx_path=folder), device, 2)


def test_the_reason_without_a_library_says_where_it_was_looked_for(tmp_path: Path) -> None:
    why = plugin.supports(asking(str(tmp_path)))
    assert why == f"FLAGCX_PATH={tmp_path} has no libflagcx.so in build/lib or lib"
    assert plugin.supports(asking(None)) == "FlagCX is not installed, and FLAGCX_PATH is not set"


@pytest.mark.parametrize("below", ["build/lib", "lib", "flagcx/lib"])
def test_a_folder_or_an_installed_package_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    file = tmp_path / below / "libflagcx.so"
    file.parent.mkdir(parents=True)
    file.touch()
    folder = str(tmp_path)
    if below == "flagcx/lib":
        (tmp_path / "flagcx" / "__init__.py").touch()
        monkeypatch.syspath_prepend(folder)
        folder = None
    assert library.find(folder) == file and plugin.supports(asking(folder)) is True


@pytest.mark.parametrize(
    ("flag", "why"),
    [
        ("-DOLDER", "is older than FlagCX 0.13, and has other functions"),
        ("-DHALF", "it lacks flagcxAllGather"),
    ],
)
def test_another_version_and_half_a_library_are_one_line(
    tmp_path: Path, flag: str, why: str
) -> None:
    folder = built(tmp_path, flag)
    assert plugin.supports(asking(str(folder))) is True  # files alone do not show it
    with pytest.raises(LibraryError, match=f"^{re.escape(str(folder))}.*{why}$"):
        plugin.class_path(asking(str(folder)))
    assert library.loaded_library() is None


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    file = tmp_path / "lib" / "libflagcx.so"
    file.parent.mkdir()
    file.write_text("no ELF")
    with pytest.raises(LibraryError, match="cannot be loaded: ") as caught:
        plugin.class_path(asking(str(tmp_path)))
    assert "\n" not in str(caught.value)


def test_a_process_has_one_library(tmp_path: Path) -> None:
    one, other = built(tmp_path / "one"), built(tmp_path / "other")
    (tmp_path / "link").symlink_to(one)
    loaded = library.load_library(library.find(str(one)))
    assert library.load_library(library.find(str(tmp_path / "link"))) is loaded
    with pytest.raises(LibraryError, match=f"already loaded {re.escape(str(one))}"):
        library.load_library(library.find(str(other)))
    assert loaded.version == 1300 and len(loaded.digest) == 16


def test_the_class_follows_the_device(tmp_path: Path) -> None:
    folder = str(built(tmp_path))
    assert plugin.class_path(asking(folder, "cuda")).endswith("cuda.FlagcxCudaCommunicator")
    assert plugin.class_path(asking(folder, "npu")).endswith("communicator.FlagcxCommunicator")


def test_a_call_that_fails_says_which_and_why(tmp_path: Path) -> None:
    loaded = library.load_library(library.find(str(built(tmp_path))))
    with pytest.raises(FlagcxError, match="flagcxGroupEnd failed in group x: invalid usage") as e:
        loaded.call("flagcxGroupEnd", None, where=" in group x")
    assert (e.value.function, e.value.code) == ("flagcxGroupEnd", 5)


def test_doctor_names_a_path_that_leads_nowhere(tmp_path: Path) -> None:
    class Settings(SimpleNamespace):
        @property
        def chosen(self) -> dict[str, object]:
            return {} if self.flagcx_path is None else {"flagcx_path": self.flagcx_path}

    (finding,) = plugin.doctor(Settings(flagcx_path=str(tmp_path)))
    assert "has no libflagcx.so" in finding.what
    assert list(plugin.doctor(Settings(flagcx_path=None))) == []
    assert list(plugin.doctor(Settings(flagcx_path=str(built(tmp_path))))) == []
