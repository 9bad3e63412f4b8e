"""`vllm-fl policy`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from commands import SOUND, Command, Plugin

from vllm_fl.cli.common import UsageError
from vllm_fl.cli.policy import text_of
from vllm_fl.settings.policy import OpOrder
from vllm_fl.settings.schema import ITEMS, Setting, Settings
from vllm_fl.settings.table import Pinned, Table, TunedOp

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


def test_a_platform_that_was_forced_is_not_called_detected(fl: Command, plugin: Plugin) -> None:
    plugin()
    done = fl("policy", "--json", VLLM_FL_PLATFORM="cuda")
    row = next(row for row in done.json()["settings"] if row["key"] == "platform")
    assert (row["value"], row["origin"]) == ("cuda", "environment VLLM_FL_PLATFORM")
    assert {"value": "cuda", "origin": "detected"} not in row["overrides"]
    (line,) = [
        x for x in fl("policy", VLLM_FL_PLATFORM="ascend").out.splitlines() if "Platform:" in x
    ]
    assert line == "Platform: ascend (environment VLLM_FL_PLATFORM)"
    plain = fl("policy", VLLM_FL_PLATFORM="ascend").out
    assert "ascend (detected)" not in plain


SHIPS = """
@hookimpl
def policy(platform):
    return PolicyDefaults({path!r}) if platform == "acme" else None
"""


@pytest.fixture
def two(plugin: Plugin, tmp_path: Path) -> list[Path]:
    """Two backends with a policy for one platform, that disagree about an op and a word."""
    paths = [tmp_path / "one.yaml", tmp_path / "two.yaml"]
    orders = ("[vendor, flagos, reference]", "[flagos, vendor, reference]")
    for path, order, strict in zip(paths, orders, ("true", "false"), strict=True):
        path.write_text(f"strict: {strict}\nop_backends:\n  silu_and_mul: {order}\n")
        plugin(SHIPS.format(path=str(path)))
    return paths


def test_what_was_merged_and_from_where(fl: Command, two: list[Path]) -> None:
    done = fl("policy", "--json", VLLM_FL_PLATFORM="acme")
    assert done.status == 0
    rows = {row["key"]: row for row in done.json()["settings"]}
    order = rows["op_backends.silu_and_mul"]
    assert order["value"] == ["flagos", "vendor", "reference"]
    # In the order of the modules' names, which count up over the tests: plugin10 before plugin9.
    merged = {each["origin"].split(" ")[0]: each["value"][0] for each in order["merged"]}
    assert merged == {f"{two[0]}:3": "vendor", f"{two[1]}:3": "flagos"}
    assert len(order["disagreements"]) == 1
    assert rows["strict"]["value"] is False
    assert rows["strict"]["disagreements"]
    assert "merged" not in rows["prefer"]
    plain = fl("policy", VLLM_FL_PLATFORM="acme").out
    assert "op_backends.silu_and_mul is made of the policy files of several backends:" in plain
    assert "They disagree: " in plain
    settled = fl("policy", VLLM_FL_PLATFORM="acme", VLLM_FL_CONFIG=str(two[0])).out
    assert "They disagree" not in settled


def test_ops_that_are_ordered_alike_are_one_finding(fl: Command, two: list[Path]) -> None:
    for path in two:
        order = path.read_text().splitlines()[-1].split(": ")[1]
        path.write_text(path.read_text() + f"  rms_norm: {order}\n  relu2: [reference]\n")
    findings = fl("doctor", "--json", VLLM_FL_PLATFORM="acme").json()["findings"]
    about = [each for each in findings if "op_backends" in each["what"]]
    assert len(about) == 1
    assert "silu_and_mul" in about[0]["what"] and "rms_norm" in about[0]["what"]
    assert "relu2" not in about[0]["what"]
    order = "=flagos|vendor|reference"
    assert about[0]["todo"] == f"export VLLM_FL_PER_OP='silu_and_mul{order};rms_norm{order}'"


def test_two_policies_end_nothing(fl: Command, two: list[Path]) -> None:
    assert "sets it differently" not in fl("plugins", VLLM_FL_PLATFORM="acme").err


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
    name = plugin(SOUND + SHIPS.format(path=str(path)))
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
        ("vendor:cuda", True),
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


@pytest.mark.parametrize(
    ("order", "where"),
    [
        (
            {"<=8": "vendor:acne", "rest": "vendor"},
            "implementation for calls of at most 8 tokens: a call",
        ),
        ({"<=8": "vendor", "rest": "vendor:acne"}, "implementation for larger calls: a call"),
        ({"<=8": "vendor:acne", "rest": "vendor:acne"}, "implementation: a call"),
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
    (warning,) = fl("policy", "--json", VLLM_FL_OP_CONFIG=str(path)).json()["warnings"]
    assert "'vendor:acne'. Did you mean 'vendor:acme'?" in warning
    assert f"lost every {where}" in warning


def test_orders_by_size_are_shown_as_they_are_written(fl: Command, tmp_path: Path) -> None:
    path = tmp_path / "fl.yaml"
    path.write_text("op_backends: {rms_norm: {<=16: stock, rest: [flagos, vendor]}}")
    shown = fl("policy", "--json", VLLM_FL_CONFIG=str(path)).json()["settings"]
    (row,) = [row for row in shown if row["key"] == "op_backends.rms_norm"]
    assert row["value"] == {"<=16": ["stock"], "rest": ["flagos", "vendor"]}
    assert "<=16: stock; rest: flagos, vendor" in fl("policy", VLLM_FL_CONFIG=str(path)).out


def test_what_is_no_token_is_told_the_one_that_was_meant(fl: Command, plugin: Plugin) -> None:
    plugin()
    for text, meant in {
        "vendor.acme": "vendor:acme",
        "reference.torch": "impl:reference.torch",
        "vendor: acme": "vendor:acme",
    }.items():
        done = fl("policy", VLLM_FL_PER_OP=f"silu_and_mul={text}")
        assert done.status == 2
        assert f"Did you mean '{meant}'?" in done.err


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


MERGED = OpOrder.of(["vendor", "stock"], pinned=False)


def test_what_a_file_cannot_say_is_refused() -> None:
    unowned = Setting("acme_level", "high", "/etc/fl.yaml:3")
    with pytest.raises(UsageError, match="no loaded plugin owns acme_level"):
        text_of(Settings((Setting("table", None), unowned)))


def test_a_list_beneath_a_table_is_refused_and_the_users_own_is_written(tmp_path: Path) -> None:
    table = Table(
        {}, "eager", "bfloat16", {}, "", "2026-11-22", 0, {"rms_norm": TunedOp("c", "stock", ())}
    )
    file = tmp_path / "table.json"
    file.write_text(table.text)
    pinned = Pinned.read(str(file), "environment VLLM_FL_TABLE")
    named = Setting("table", str(file))

    def text(order: OpOrder) -> str:
        return text_of(Settings((named, Setting("op_backends.rms_norm", order)), pinned=pinned))

    with pytest.raises(UsageError, match=r"table\.json orders rms_norm"):
        text(MERGED)
    assert "rms_norm:" in text(dataclasses.replace(MERGED, pinned=True))


def test_a_name_that_is_too_long_is_one_clear_error(fl: Command, tmp_path: Path) -> None:
    done = fl("policy", "--write", str(tmp_path / ("x" * 300)))
    assert done.status == 2 and done.out == ""
    (line,) = done.err.splitlines()
    assert line.startswith("vllm-fl: --write ") and "File name too long" in line
