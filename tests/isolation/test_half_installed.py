"""A distribution with a missing part, next to a sound one: it is reported, the other works."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from installed import Install, Installed

BROKEN = "fl-twin-a"
NO_METADATA = "fl_twin_a-1.0.dist-info has no METADATA"


def info(site: Path) -> Path:
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


REFUSED = {
    lose_module: "ModuleNotFoundError: No module named 'fl_twin_a'",
    lose_metadata: f"{NO_METADATA}: it is half uninstalled",
}
"""Entry point that is still found -> why it is rejected; the other files are no longer found."""


def findings(installed: Installed, check: str, **variables: str) -> list[dict[str, Any]]:
    found = installed.answer("doctor", status=1, **variables)["findings"]
    return [finding for finding in found if finding["check"] == check]


@pytest.mark.parametrize(
    ("damage", "what", "todo"),
    [
        (lose_module, "files are missing, among them fl_twin_a.py", "--force-reinstall"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (lose_entry_points, "them fl_twin_a-1.0.dist-info/entry_points.txt", BROKEN),
                (lose_record_and_entry_points, "is partly installed: it has no RECORD", BROKEN),
                (lose_metadata, NO_METADATA, "rm -r /"),
                (lose_all_metadata, NO_METADATA, "rm -r /"),
            )
        ),
    ],
)
def test_it_is_named_and_harms_no_other(
    install: Install, damage: Callable[[Path], None], what: str, todo: str
) -> None:
    installed = install("fl-sound", BROKEN, fresh=True)
    damage(installed.env.site_packages)
    (finding,) = findings(installed, "half-installed")
    assert what in finding["what"] and todo in finding["todo"]
    cause = REFUSED.get(damage)
    plugins = installed.plugins()
    assert plugins["fl-sound"]["status"] == "ok"
    if cause is None:
        assert set(plugins) == {"fl-sound"}
    else:
        failed = plugins[BROKEN]
        assert (failed["status"], failed["version"]) == ("failed", "1.0")
        assert cause in failed["error"] and "disable it with VLLM_FL_PLUGINS" in failed["error"]
        left_out = installed.plugins(VLLM_FL_PLUGINS="fl-sound")
        assert left_out[BROKEN]["status"] == "disabled"
    op = installed.ops()["silu_and_mul"]
    assert op["selected"] == "vendor.sound"
    assert [c["distribution"] for c in op["candidates"]] == ["fl-sound"]


def test_doctor_has_nothing_to_say_of_whole_ones_and_reads_vllms_list_of_plugins(
    install: Install,
) -> None:
    installed = install("fl-sound")
    assert findings(installed, "half-installed") == []
    (finding,) = findings(installed, "vllm-plugins", VLLM_PLUGINS="lora_filesystem_resolver")
    assert "does not contain 'fl'" in finding["what"]
    assert "vLLM runs unmodified" in finding["why"]
    assert finding["todo"] == "export VLLM_PLUGINS=lora_filesystem_resolver,fl"
    assert findings(installed, "vllm-plugins", VLLM_PLUGINS="fl") == []
