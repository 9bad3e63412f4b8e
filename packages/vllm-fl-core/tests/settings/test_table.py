"""The tuning table of a setting: a settings file between the user's and the platform's orders."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_fl.errors import InvalidSettingError
from vllm_fl.settings.loading import load_settings
from vllm_fl.settings.schema import Settings

KEY = "op_backends.rms_norm"
CPU = "cpu"
TEXT = """\
holds:
  vllm: 0.32.0
  device: cpu
  distributions: {fl-cpu: "1.0"}
devices:
- name: cpu
  op_backends:
    rms_norm:
      eager: {"<=16": impl:reference.torch, rest: impl:vendor.cpu}
      measured: {date: '2026-11-22', device: cpu, ratio: 1.5, what: 16 tokens}
"""
HERE = {"vllm": "0.32.0", "fl-cpu": "1.0"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "table.yaml"
    file.write_text(TEXT)
    return file


def order(settings: Settings) -> str:
    listed = settings.with_devices(CPU, "eager").policy.per_op_order.get("rms_norm")
    return str(listed and replace(listed, compiled=listed.eager))


def test_it_orders_on_its_device_wherever_it_was_read(path: Path) -> None:
    settings = load_settings({"VLLM_FL_TABLE": str(path)})
    there = pickle.loads(pickle.dumps(settings))  # another process does not read the file
    assert there == settings and there.tuned.distributions == {"fl-cpu": "1.0"}
    assert order(there) == (
        "<=16 impl:reference.torch|flagos|vendor|stock|reference, "
        "rest impl:vendor.cpu|flagos|vendor|stock|reference"
    )
    assert KEY not in settings.with_devices("H100", "eager")
    assert settings.with_devices(CPU, "eager")[KEY].origin.startswith(f"{path}:8, measured ")
    without = settings.without_table("it is old")
    assert without.tuned is not None and without.tuned.unused == "it is old"
    assert KEY not in without.with_devices(CPU, "eager")


def test_a_value_that_differs_is_named(path: Path) -> None:
    table = load_settings({"VLLM_FL_TABLE": str(path)}).tuned
    assert table is not None and table.differs("cpu", HERE.get) == ""
    for device, versions, words in (
        ("H100", HERE, "the device is H100, but the measurement used cpu"),
        ("cpu", {**HERE, "vllm": "0.33.0"}, "vllm is 0.33.0, but the measurement used 0.32.0"),
        ("cpu", {"vllm": "0.32.0"}, "fl-cpu is not installed, but the measurement used 1.0"),
    ):
        assert table.differs(device, versions.get) == words


def test_the_users_lists_win_over_it_and_it_over_the_platforms(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "cpu.yaml"
    file.write_text(TEXT[TEXT.index("devices") :].replace("16", "32") + "op_backends: {}\n")
    files = [("fl-cpu", str(file))]
    env = {"VLLM_FL_TABLE": str(path)}
    settings = load_settings(env, platform="cpu", platform_files=files)
    assert order(settings).startswith("<=16 ")
    assert order(settings.without_table("it is old")).startswith("<=32 ")
    for more, found in (
        ({"VLLM_FL_PER_OP": "rms_norm=vendor"}, "vendor"),
        ({"VLLM_FL_PREFER": "vendor"}, "<=16 impl:reference.torch|vendor|flagos"),
    ):
        assert order(load_settings(env | more, platform_files=files)).startswith(found)


def test_a_users_file_names_one_in_its_folder_and_a_plugins_none(
    path: Path, tmp_path: Path
) -> None:
    config = tmp_path / "fl.yaml"
    config.write_text(f"table: table.yaml\n{TEXT[TEXT.index('devices') :]}".replace("16", "64"))
    settings = load_settings({"VLLM_FL_CONFIG": str(config)})
    assert settings.table == str(path) and settings.tuned is not None
    assert settings["table"].origin == f"{config}:1"
    assert order(settings).startswith("<=64 "), "a user's own orders for a device"
    config.write_text("prefer: vendor\n")
    settings = load_settings({"VLLM_FL_CONFIG": str(config), "VLLM_FL_TABLE": str(path)})
    assert settings.table is None and settings.tuned is None
    config.write_text("table: table.yaml\n")
    with pytest.raises(InvalidSettingError, match=r"fl.yaml:1 \(fl-cpu\): table: a plugin's file"):
        load_settings({}, platform="cpu", platform_files=[("fl-cpu", str(config))])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ":1: table: holds is missing"),
        ("holds: {}\n", ":1: table: devices is missing"),
        ("holds: {}\ndevices: []\nprefer: vendor\n", ":3: table: unknown key 'prefer'."),
        ("holds: {vlm: 1}\ndevices: []\n", ":1: holds: unknown key 'vlm'. Did you mean 'vllm'?"),
    ],
)
def test_a_wrong_one_is_named_with_its_line(path: Path, text: str, words: str) -> None:
    path.write_text(text)
    with pytest.raises(InvalidSettingError) as caught:
        load_settings({"VLLM_FL_TABLE": str(path)})
    assert f"{path}{words}" in str(caught.value)
