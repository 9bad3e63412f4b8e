"""`vllm-fl settings`."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import SOUND, Command, Plugin

from vllm_fl.settings.schema import ITEMS

WITH_FILE = """
@hookimpl
def policy(platform):
    return PolicyDefaults({path!r}) if platform == "acme" else None
"""


def test_every_setting_with_its_origin_and_what_it_overrides(
    fl: Command, plugin: Plugin, tmp_path: Path
) -> None:
    path = tmp_path / "acme.yaml"
    path.write_text("prefer: vendor\nop_backends:\n  rms_norm: [vendor, reference]\n")
    plugin(WITH_FILE.format(path=str(path)))
    variables = {"VLLM_FL_PLATFORM": "acme", "VLLM_FL_PREFER": "reference"}
    answer = fl("settings", "--json", **variables).json()
    assert answer["platform"] == "acme"
    (file,) = answer["platform_files"]
    assert file.startswith(str(path))
    rows = {row["key"]: row for row in answer["settings"]}
    assert set(ITEMS) <= set(rows)
    assert (rows["strict"]["value"], rows["strict"]["origin"]) == (False, "default")
    assert rows["prefer"]["origin"] == "environment VLLM_FL_PREFER"
    (below, *_) = rows["prefer"]["overrides"]
    assert below["value"] == "vendor" and below["origin"].startswith(f"{path}:1")
    order = rows["op_backends.rms_norm"]
    assert order["value"] == ["reference", "vendor"]  # re-sorted
    assert order["overrides"][0]["value"] == ["vendor", "reference"]
    plain = fl("settings", **variables).out
    assert str(path) in plain.replace("\n", "")
    assert all(any(line.split()[:1] == [key] for line in plain.splitlines()) for key in ITEMS)


def test_no_other_variable_is_printed(fl: Command, plugin: Plugin) -> None:
    plugin()
    variables = {"DATABASE": "postgres-7Q", "VLLM_FL_API_TOKEN": "tk-0123456789"}
    for done in (fl("settings", **variables), fl("settings", "--json", **variables)):
        assert not any(value in done.out + done.err for value in variables.values())
        assert "VLLM_FL_API_TOKEN" in done.out  # a warning: not a setting
    assert fl("settings", **variables).out.startswith("Warning: ")


BROKEN = {
    "prefer: [": "invalid YAML",
    "op_backends: {silu_and_mul: vendr}": "'vendr' is not a valid selector",
}


@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_policy_file(fl: Command, plugin: Plugin, tmp_path: Path, content: str) -> None:
    path = tmp_path / "acme.yaml"
    path.write_text(content)
    plugin(SOUND + WITH_FILE.format(path=str(path)))
    for verb in (["plan"], ["settings"], ["explain", "silu_and_mul"]):
        done = fl(*verb, VLLM_FL_PLATFORM="acme")
        assert done.status == 2
        assert str(path) in done.err and BROKEN[content] in done.err


def test_a_selector_that_matches_nothing(fl: Command, plugin: Plugin) -> None:
    plugin()
    variables = {"VLLM_FL_PER_OP": "silu_and_mul=impl:vendor.acne|vendor"}
    (warning,) = fl("settings", "--json", **variables).json()["warnings"]
    assert "'impl:vendor.acne'. Did you mean 'impl:vendor.acme'?" in warning
    assert fl("explain", "silu_and_mul", "--json", **variables).json()["unmatched"] == [warning]
    assert fl("explain", "rms_norm", "--json", **variables).json()["unmatched"] == []
