"""Lock files: complete, or one error with the reason."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from vllm_fl.errors import InvalidSettingError, MissingFileError
from vllm_fl.settings.loading import load_settings
from vllm_fl.settings.lock import MARK, VERSION, read_lock

CONTENTS: dict[str, Any] = {
    "facts": {"torch": "2.13.0", "setting prefer": ["vendor", "a file"]},
    "result": {"ops": {"rms_norm": "vendor.cpu"}, "digest": "0123", "out": {}},
    "seed": 7,
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "vllm-fl.lock"
    path.write_text(json.dumps({MARK: VERSION, **CONTENTS}, indent=1), encoding="utf-8")
    return path


def test_it_is_read_with_the_settings_and_travels_with_them(file: Path) -> None:
    settings = load_settings({"VLLM_FL_LOCK": str(file)})
    assert settings.locked == read_lock(str(file))
    assert vars(settings.locked) == {"file": str(file), **CONTENTS, "warns": False}
    warned = load_settings({"VLLM_FL_LOCK": f"warn:{file}"}).locked
    assert warned is not None and vars(warned) == {"file": str(file), **CONTENTS, "warns": True}
    assert pickle.loads(pickle.dumps(settings)).locked == settings.locked
    assert load_settings({}).locked is None
    with pytest.raises(MissingFileError) as raised:
        load_settings({"VLLM_FL_LOCK": f"{file}.gone"})
    assert raised.value.origin == "environment VLLM_FL_LOCK"


@pytest.mark.parametrize(
    "broken",
    [
        lambda text: text[:-20],
        lambda text: text.replace(f'"{MARK}": {VERSION}', f'"{MARK}": 1'),
        lambda text: text.replace('"seed"', '"sead"'),
        lambda text: '["vllm_fl_lock", 1]',
        lambda text: json.dumps({**json.loads(text), "facts": {}}),
        lambda text: json.dumps({**json.loads(text), "result": "x", "seed": "q"}),
        lambda text: "",
    ],
)
def test_a_broken_one_is_one_error(file: Path, broken: Any) -> None:
    file.write_text(broken(file.read_text()))
    with pytest.raises(InvalidSettingError) as raised:
        load_settings({"VLLM_FL_LOCK": str(file)})
    assert raised.value.key == "lock" and str(file) in raised.value.origin
    assert "not a complete version" in raised.value.message and "\n" not in raised.value.message
