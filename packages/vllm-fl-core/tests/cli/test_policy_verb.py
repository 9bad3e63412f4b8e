"""`vllm-fl policy`."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Command, Plugin

from vllm_fl.dispatch.items import ITEMS

WITH_FILE = """
@hookimpl
def policy(platform):
    return PolicyDefaults({path!r}) if platform == "acme" else None
"""


@pytest.fixture
def shipped(plugin: Plugin, tmp_path: Path) -> Path:
    path = tmp_path / "acme.yaml"
    path.write_text("prefer: vendor\nop_backends:\n  rms_norm: [vendor, reference]\n")
    plugin(WITH_FILE.format(path=str(path)))
    return path


def test_every_setting_with_its_origin(fl: Command, plugin: Plugin) -> None:
    plugin()
    done = fl("policy", "--json", VLLM_FL_PLATFORM="none")
    assert done.status == 0
    rows = {row["key"]: row for row in done.json()["settings"]}
    assert set(ITEMS) <= set(rows)
    assert rows["prefer"] == {
        "key": "prefer",
        "value": "flagos",
        "origin": "default",
        "overrides": [],
    }
    assert rows["platform"]["origin"] == "environment VLLM_FL_PLATFORM"
    plain = fl("policy", VLLM_FL_PLATFORM="none")
    for key in ITEMS:
        assert any(line.split()[:1] == [key] for line in plain.out.splitlines()), key


def test_the_platforms_file_and_what_overrides_it(fl: Command, shipped: Path) -> None:
    done = fl("policy", "--json", VLLM_FL_PLATFORM="acme", VLLM_FL_PREFER="reference")
    answer = done.json()
    assert answer["platform"] == "acme"
    (file,) = answer["platform_files"]
    assert file.startswith(str(shipped))
    rows = {row["key"]: row for row in answer["settings"]}
    assert rows["prefer"]["origin"] == "environment VLLM_FL_PREFER"
    (below, *_) = rows["prefer"]["overrides"]
    assert below["value"] == "vendor"
    assert below["origin"].startswith(f"{shipped}:1")
    order = rows["op_backends.rms_norm"]
    assert order["value"] == ["reference", "vendor"]  # re-sorted
    assert order["overrides"][0]["value"] == ["vendor", "reference"]
    assert str(shipped) in fl("policy", VLLM_FL_PLATFORM="acme").out


def test_names_that_nobody_checked_and_warnings(fl: Command, plugin: Plugin) -> None:
    plugin()
    variables = {"VLLM_FL_PER_OP": "rms_nrom=reference", "VLLM_FL_OOT_BLACKLIST": "fused_moe"}
    done = fl("policy", "--json", **variables)
    assert done.status == 0
    assert {"op_backends.rms_nrom", "oot_blacklist.fused_moe"} <= set(done.json()["unchecked"])
    (warning,) = [w for w in done.json()["warnings"] if "rms_nrom" in w]
    assert "'rms_norm'" in warning
    plain = fl("policy", **variables)
    assert "  oot_blacklist.fused_moe" in plain.out
    assert warning in plain.out
    assert warning not in plain.err, "it is said once"


def test_an_order_of_both_modes(fl: Command, plugin: Plugin, tmp_path: Path) -> None:
    plugin()
    config = tmp_path / "mine.yaml"
    config.write_text("op_backends:\n  rms_norm:\n    eager: [vendor]\n    compiled: [stock]\n")
    done = fl("policy", "--json", VLLM_FL_CONFIG=str(config))
    rows = {row["key"]: row for row in done.json()["settings"]}
    assert rows["op_backends.rms_norm"]["value"] == {"eager": ["vendor"], "compiled": ["stock"]}
    assert rows["op_backends.rms_norm"]["origin"] == f"{config}:2"
    plain = fl("policy", VLLM_FL_CONFIG=str(config)).out
    assert "eager: vendor; compiled: stock" in plain


def test_no_other_variable_is_printed(fl: Command, plugin: Plugin) -> None:
    plugin()
    variables = {"DATABASE": "postgres-7Q", "VLLM_FL_API_TOKEN": "tk-0123456789"}
    for done in (fl("policy", **variables), fl("policy", "--json", **variables)):
        for value in variables.values():
            assert value not in done.out + done.err
        assert "VLLM_FL_API_TOKEN" in done.out  # that it is no setting, it says
