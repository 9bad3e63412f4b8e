"""`vllm-fl settings`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import SOUND, Command, Plugin

from vllm_fl.settings.schema import ITEMS

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
    done = fl("settings", "--json", VLLM_FL_PLATFORM="none")
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
    plain = fl("settings", VLLM_FL_PLATFORM="none")
    for key in ITEMS:
        assert any(line.split()[:1] == [key] for line in plain.out.splitlines()), key


def test_the_platforms_file_and_what_overrides_it(fl: Command, shipped: Path) -> None:
    done = fl("settings", "--json", VLLM_FL_PLATFORM="acme", VLLM_FL_PREFER="reference")
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
    assert str(shipped) in fl("settings", VLLM_FL_PLATFORM="acme").out


def test_no_other_variable_is_printed(fl: Command, plugin: Plugin) -> None:
    plugin()
    variables = {"DATABASE": "postgres-7Q", "VLLM_FL_API_TOKEN": "tk-0123456789"}
    for done in (fl("settings", **variables), fl("settings", "--json", **variables)):
        assert not any(value in done.out + done.err for value in variables.values())
        assert "VLLM_FL_API_TOKEN" in done.out  # that it is no setting, it says


BROKEN = {
    "prefer: [": "invalid YAML",
    "op_backends: {silu_and_mul: vendr}": "'vendr' is not a valid token",
    "allow_vendors: [acme]": "every other vendor",
}


@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_policy_file_costs_only_what_needs_a_policy(
    fl: Command, plugin: Plugin, tmp_path: Path, content: str
) -> None:
    path = tmp_path / "acme.yaml"
    path.write_text(content)
    plugin(SOUND + WITH_FILE.format(path=str(path)))
    for verb in (["plan"], ["settings"], ["explain", "silu_and_mul"]):
        done = fl(*verb, VLLM_FL_PLATFORM="acme")
        assert done.status == 2
        assert str(path) in done.err and BROKEN[content] in done.err


@pytest.mark.parametrize(
    ("token", "meant"),
    [
        ("impl:vendor.acne", "impl:vendor.acme"),
        ("impl:acme", "vendor:acme"),
        ("vendor:vendor.acme", "vendor:acme"),
        ("vendor:Acme", "vendor:acme"),
        ("impl:vendor", "vendor"),
    ],
)
def test_a_token_that_matches_nothing_is_named_with_what_was_meant(
    fl: Command, plugin: Plugin, token: str, meant: str
) -> None:
    plugin()
    variables = {"VLLM_FL_PER_OP": f"silu_and_mul={token}|vendor"}
    (warning,) = fl("settings", "--json", **variables).json()["warnings"]
    assert f"{token!r}. Did you mean {meant!r}?" in warning
    assert "lost" not in warning
    (said,) = fl("explain", "silu_and_mul", "--json", **variables).json()["unmatched"]
    assert said == warning
    assert warning in fl("explain", "silu_and_mul", **variables).out
    assert fl("explain", "rms_norm", "--json", **variables).json()["unmatched"] == []


@pytest.mark.parametrize(
    ("listed", "lost"),
    [
        ("impl:vendor.acne", True),
        ("flagos", True),
        ("reference|impl:vendor.acne", True),
        ("vendor:cuda|vendor", False),  # one list may serve several machines
        ("flagos|stock", False),
    ],
)
def test_an_op_that_lost_every_implementation_is_called_that(
    fl: Command, plugin: Plugin, listed: str, lost: bool
) -> None:
    plugin()
    warnings = fl("settings", "--json", VLLM_FL_PER_OP=f"silu_and_mul={listed}").json()["warnings"]
    assert ["lost every implementation" in warning for warning in warnings] == [True] * lost
    assert not any("no effect" in warning for warning in warnings)


@pytest.mark.parametrize(
    ("order", "where"),
    [
        ({"<=8": "vendor", "rest": "vendor:acne"}, "implementation for larger calls: a call"),
        (
            {"eager": {"<=8": "vendor:acne", "rest": "vendor"}, "compiled": "vendor"},
            "implementation for calls of at most 8 tokens in eager mode: a call",
        ),
    ],
)
def test_a_row_that_lost_every_implementation_is_named(
    fl: Command, plugin: Plugin, tmp_path: Path, order: object, where: str
) -> None:
    plugin()
    path = tmp_path / "orders.json"
    path.write_text(json.dumps({"silu_and_mul": order}))
    (warning,) = fl("settings", "--json", VLLM_FL_OP_CONFIG=str(path)).json()["warnings"]
    assert "'vendor:acne'. Did you mean 'vendor:acme'?" in warning
    assert f"lost every {where}" in warning
