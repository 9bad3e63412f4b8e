"""`vllm-fl policy`."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import SOUND, Command, Plugin

from vllm_fl.settings.schema import ITEMS, Setting, Settings
from vllm_fl_tools.cli._show import UsageError
from vllm_fl_tools.cli.policy import text_of

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


def test_no_other_variable_is_printed(fl: Command, plugin: Plugin) -> None:
    plugin()
    variables = {"DATABASE": "postgres-7Q", "VLLM_FL_API_TOKEN": "tk-0123456789"}
    for done in (fl("policy", **variables), fl("policy", "--json", **variables)):
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
    name = plugin(SOUND + WITH_FILE.format(path=str(path)))
    listed = fl("plugins", "--json", VLLM_FL_PLATFORM="acme")
    assert listed.status == 0
    (row,) = [row for row in listed.json()["plugins"] if row["name"] == name]
    assert row["status"] == "ok"
    for verb in (["ops"], ["policy"], ["explain", "silu_and_mul"]):
        done = fl(*verb, VLLM_FL_PLATFORM="acme")
        assert done.status == 2
        assert str(path) in done.err and BROKEN[content] in done.err


@pytest.mark.parametrize(
    ("token", "meant"),
    [
        ("impl:vendor.acne", "impl:vendor.acme"),
        ("impl:acme", "impl:vendor.acme"),
        ("vendor:vendor.acme", "vendor:acme"),
        ("vendor:Acme", "vendor:acme"),
    ],
)
def test_a_token_that_matches_nothing_is_named_with_what_was_meant(
    fl: Command, plugin: Plugin, token: str, meant: str
) -> None:
    plugin()
    variables = {"VLLM_FL_PER_OP": f"silu_and_mul={token}|vendor"}
    (warning,) = fl("policy", "--json", **variables).json()["warnings"]
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
    warnings = fl("policy", "--json", VLLM_FL_PER_OP=f"silu_and_mul={listed}").json()["warnings"]
    assert ["lost every implementation" in warning for warning in warnings] == [True] * lost
    assert not any("no effect" in warning for warning in warnings)


def values(fl: Command, **variables: str) -> dict[str, object]:
    """What holds, by key: a file of the user's has other origins."""
    rows = fl("policy", "--json", **variables).json()["settings"]
    return {r["key"]: r["value"] for r in rows if r["key"] not in ("config", "platform_files")}


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"VLLM_FL_PREFER": "reference", "VLLM_FL_STRICT": "1"},
        {"VLLM_FL_ALLOW_VENDORS": "acme,on", "VLLM_FL_DENY_VENDORS": "other"},
        {"VLLM_FL_PER_OP": "rms_norm=stock|vendor:acme;silu_and_mul=impl:vendor.acme"},
        {"VLLM_FL_OOT_WHITELIST": "RMSNorm", "VLLM_FL_PREFLIGHT": "run"},
    ],
    ids=str,
)
def test_the_file_that_is_written_loads_to_the_same_effect(
    fl: Command, shipped: Path, tmp_path: Path, variables: dict[str, str]
) -> None:
    file = tmp_path / "all.yaml"
    variables = {"VLLM_FL_PLATFORM": "acme", **variables}
    before = values(fl, **variables)
    answer = fl("policy", "--write", str(file), "--json", **variables)
    assert answer.status == 0, answer.err
    beside = dict(variable.split("=", 1) for variable in answer.json()["environment"])
    assert beside["VLLM_FL_PLATFORM"] == "acme"
    assert values(fl, VLLM_FL_CONFIG=str(file), **beside) == before
    assert "prefer: vendor" in file.read_text() or "VLLM_FL_PREFER" in variables


def test_orders_by_mode_and_size_are_written(fl: Command, plugin: Plugin, tmp_path: Path) -> None:
    plugin()
    mine, again = tmp_path / "mine.yaml", tmp_path / "again.yaml"
    mine.write_text(
        "op_backends:\n  rms_norm:\n    eager: {'<=16': stock, rest: [vendor, stock]}\n"
        "  silu_and_mul: {compiled: [stock]}\n"
    )
    before = values(fl, VLLM_FL_CONFIG=str(mine))
    assert fl("policy", "--write", str(again), VLLM_FL_CONFIG=str(mine)).status == 0
    assert values(fl, VLLM_FL_CONFIG=str(again)) == before


def test_a_file_that_is_there_is_replaced_by_force_alone(
    fl: Command, plugin: Plugin, tmp_path: Path
) -> None:
    plugin()
    file = tmp_path / "all.yaml"
    file.write_text("mine")
    done = fl("policy", "--write", str(file))
    assert (done.status, file.read_text()) == (2, "mine")
    assert "--force" in done.err
    assert fl("policy", "--write", str(file), "--force").status == 0
    assert "VLLM_FL_CONFIG" in file.read_text()
    assert fl("policy", "--force").status == 2
    assert fl("policy", "--write", str(tmp_path / "no" / "where.yaml")).status == 2


def test_what_a_file_cannot_say_is_refused() -> None:
    unowned = Setting("acme_level", "high", "/etc/fl.yaml:3")
    with pytest.raises(UsageError, match="no loaded plugin owns acme_level"):
        text_of(Settings((Setting("table", None), unowned)))
