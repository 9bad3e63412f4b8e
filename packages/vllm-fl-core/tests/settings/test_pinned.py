"""The table that a setting names: read where settings are read, carried, and beneath the user's
lists."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from vllm_fl.errors import InvalidSettingError
from vllm_fl.settings.loading import load_settings
from vllm_fl.settings.table import Figure, Row, Table, TunedOp

KEY = "op_backends.rms_norm"
ROWS = (Row(1, "vendor.cpu"), Row(16, "reference.torch"), Row(64, "default"))
TABLE = Table(
    identity={"device": "A CPU, 2 threads", "torch": "2.13.0"},
    mode="eager",
    dtype="bfloat16",
    sizes={"hidden": 1024, "epsilon": 1e-6},
    model="tiny",
    date="2026-11-22T17:00:00+00:00",
    seconds=12.5,
    ops={"rms_norm": TunedOp("01234567", "vendor.cpu", ROWS, (Figure(16, "stock", 3.5),))},
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "table.json"
    file.write_text(TABLE.text, encoding="utf-8")
    return file


def test_it_acts_only_when_it_is_said_to_hold(path: Path) -> None:
    settings = load_settings({"VLLM_FL_TABLE": str(path)})
    there = pickle.loads(pickle.dumps(settings))  # another process needs no file
    assert there.pinned is not None and there.pinned.digest == TABLE.digest
    assert there.pinned.table.ops["rms_norm"].figures == ()
    assert there.with_table()[KEY] == settings.with_table()[KEY]
    assert settings["table"].named == f"VLLM_FL_TABLE={path}"
    assert KEY not in settings
    order = settings.with_table()[KEY].value
    assert str(order) == (
        "eager <=1 impl:vendor.cpu|flagos|vendor|stock|reference, "
        "<=16 impl:reference.torch|flagos|vendor|stock|reference, "
        "rest flagos|vendor|stock|reference, compiled (default order)"
    )
    assert settings.with_table()[KEY].origin == (
        f"table {path}, measured 2026-11-22 on A CPU, 2 threads"
    )
    assert settings.with_table(left_out=["rms_norm"]) == settings
    assert KEY not in settings, "a frozen value"


def test_it_lies_between_the_platforms_file_and_the_users_lists(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "cpu.yaml"
    file.write_text("op_backends:\n  rms_norm: [stock, impl:vendor.cpu]\n")
    files = [("fl-cpu", str(file))]
    env = {"VLLM_FL_TABLE": str(path)}
    setting = load_settings(env, platform="cpu", platform_files=files).with_table()[KEY]
    assert str(setting.value) == (
        "eager <=1 impl:vendor.cpu|stock, <=16 impl:reference.torch|stock|impl:vendor.cpu, "
        "rest stock|impl:vendor.cpu, compiled stock|impl:vendor.cpu"
    )
    ((below, origin),) = setting.overrides
    assert str(below) == "stock|impl:vendor.cpu" and origin == f"{file}:2 (fl-cpu)"
    listed = {**env, "VLLM_FL_PER_OP": "rms_norm=vendor"}
    settings = load_settings(listed, platform="cpu", platform_files=files)
    assert settings.with_table() == settings


def test_a_file_names_one_beside_itself(path: Path, tmp_path: Path) -> None:
    config = tmp_path / "fl.yaml"
    config.write_text("table: table.json\ntable_unaccepted: true\n")
    settings = load_settings({"VLLM_FL_CONFIG": str(config)})
    assert settings.table == str(path) and settings.pinned is not None
    assert settings["table"].origin == f"{config}:1"
    assert settings.table_unaccepted is True


def test_a_complete_override_has_its_own_or_none(path: Path, tmp_path: Path) -> None:
    config = tmp_path / "fl.yaml"
    config.write_text("prefer: vendor\n")
    settings = load_settings({"VLLM_FL_CONFIG": str(config), "VLLM_FL_TABLE": str(path)})
    assert settings.table is None and settings.pinned is None
    assert "VLLM_FL_TABLE" in settings.warnings[0]


def test_a_plugins_file_names_none(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "cpu.yaml"
    file.write_text("table: table.json\n")
    with pytest.raises(InvalidSettingError, match=r"cpu.yaml:1 \(fl-cpu\): table: a plugin's file"):
        load_settings({}, platform="cpu", platform_files=[("fl-cpu", str(file))])
