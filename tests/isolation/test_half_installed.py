"""A distribution of which a part is gone, beside a sound one: it is named and costs itself only."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from installed import Install, Installed

BROKEN = "fl-twin-a"


def info(site: Path) -> Path:
    """The folder of its metadata."""
    return next(site.glob("fl_twin_a-*.dist-info"))


def lose_module(site: Path) -> None:
    (site / "fl_twin_a.py").unlink()
    shutil.rmtree(site / "__pycache__", ignore_errors=True)


def lose_metadata(site: Path) -> None:
    (info(site) / "METADATA").unlink()


def lose_entry_points(site: Path) -> None:
    (info(site) / "entry_points.txt").unlink()


def lose_record_and_entry_points(site: Path) -> None:
    lose_entry_points(site)
    (info(site) / "RECORD").unlink()


def lose_all_metadata(site: Path) -> None:
    folder = info(site)
    shutil.rmtree(folder)
    folder.mkdir()


def damaged(install: Install, damage: Callable[[Path], None]) -> Installed:
    installed = install("fl-sound", BROKEN, fresh=True)
    damage(installed.env.site_packages)
    return installed


def findings(installed: Installed, check: str, **variables: str) -> list[dict[str, Any]]:
    found = installed.answer("doctor", status=1, **variables)["findings"]
    return [finding for finding in found if finding["check"] == check]


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (lose_module, "ModuleNotFoundError: No module named 'fl_twin_a'"),
        (lose_metadata, "fl_twin_a-1.0.dist-info has no METADATA: it is half uninstalled"),
    ],
)
def test_one_that_is_still_found_is_refused_by_name(
    install: Install, damage: Callable[[Path], None], cause: str
) -> None:
    installed = damaged(install, damage)
    done = installed.command("plugins", "--json")
    assert done.stderr.count(cause) == 1 and "Traceback" not in done.stderr
    plugins = installed.plugins(status=1)
    assert plugins["fl-sound"]["status"] == "ok"
    failed = plugins[BROKEN]
    assert (failed["status"], failed["version"]) == ("failed", "1.0")
    assert cause in failed["error"] and "leave it out with VLLM_FL_PLUGINS" in failed["error"]
    selected = installed.ops(status=0)["silu_and_mul"]
    assert selected["selected"] == "vendor.sound"
    assert [c["distribution"] for c in selected["candidates"]] == ["fl-sound"]
    assert installed.plugins(status=0, VLLM_FL_PLUGINS="fl-sound")[BROKEN]["status"] == "disabled"


@pytest.mark.parametrize("damage", [lose_record_and_entry_points, lose_all_metadata])
def test_one_that_is_no_longer_found_harms_nobody(
    install: Install, damage: Callable[[Path], None]
) -> None:
    installed = damaged(install, damage)
    assert set(installed.plugins(status=0)) == {"fl-sound"}
    assert installed.ops(status=0)["silu_and_mul"]["selected"] == "vendor.sound"


@pytest.mark.parametrize(
    ("damage", "what", "todo"),
    [
        (lose_module, "1 of its 8 files are gone, among them fl_twin_a.py", "--force-reinstall"),
        (lose_entry_points, "among them fl_twin_a-1.0.dist-info/entry_points.txt", BROKEN),
        (lose_record_and_entry_points, "fl-twin-a 1.0 is half installed: it has no RECORD", BROKEN),
        (lose_metadata, "fl_twin_a-1.0.dist-info has no METADATA", "rm -r /"),
        (lose_all_metadata, "fl_twin_a-1.0.dist-info has no METADATA", "rm -r /"),
    ],
)
def test_doctor_names_it_and_what_is_gone(
    install: Install, damage: Callable[[Path], None], what: str, todo: str
) -> None:
    (finding,) = findings(damaged(install, damage), "half-installed")
    assert what in finding["what"]
    assert todo in finding["todo"]


def test_doctor_has_nothing_to_say_of_whole_ones(install: Install) -> None:
    assert findings(install("fl-sound", BROKEN), "half-installed") == []


def test_doctor_says_that_vllm_plugins_leaves_us_out(install: Install) -> None:
    installed = install("fl-sound")
    (finding,) = findings(installed, "vllm-plugins", VLLM_PLUGINS="lora_filesystem_resolver")
    assert "does not name 'fl'" in finding["what"]
    assert "it runs as stock" in finding["why"]
    assert finding["todo"] == "export VLLM_PLUGINS=lora_filesystem_resolver,fl"
    assert findings(installed, "vllm-plugins", VLLM_PLUGINS="fl") == []
