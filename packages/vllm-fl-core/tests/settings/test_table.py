"""The file of a table: read as it was written, or refused in one line that says where and why."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_fl.errors import InvalidSettingError
from vllm_fl.settings.table import Figure, Row, Table, TunedOp, Verdict, read_table

TABLE = Table(
    identity={"device": "A CPU, 2 threads", "torch": "2.13.0", "vllm-fl-core": "0.1.0 abc"},
    mode="eager",
    dtype="bfloat16",
    sizes={"hidden": 1024, "epsilon": 1e-6},
    model="tiny",
    date="2026-11-22T17:00:00+00:00",
    seconds=12.5,
    ops={
        "rms_norm": TunedOp(
            contract="0123456789abcdef",
            default="vendor.cpu",
            rows=(Row(1, "vendor.cpu"), Row(16, "reference.torch"), Row(64, "default")),
            figures=(
                Figure(16, "reference.torch", 3.5, 3.25, 4.0, 21, 1.125, 1.0625, 0.75),
                Figure(16, "vendor.wrong", rejected="wrong: result 0: 3 of 64 elements are off"),
            ),
        )
    },
)


def written(path: Path, table: Table = TABLE) -> str:
    path.write_text(table.text, encoding="utf-8")
    return str(path)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    accepted = replace(TABLE, accepted=Verdict(True, "never slower", "2026-11-22", {"ratio": 1.02}))
    for table in (TABLE, accepted, replace(TABLE, ops={})):
        assert read_table(written(tmp_path / "table.json", table)) == table
    assert accepted.digest == TABLE.digest  # a verdict is about it, and no part of it
    assert replace(TABLE, dtype="float16").digest != TABLE.digest


def test_a_verdict_that_was_edited_by_hand_is_no_verdict(tmp_path: Path) -> None:
    down = Verdict(False, "slower in prefill", "2026-11-22")
    for verdict, edited in ((down, replace(down, accepted=True)), (down, None), (None, down)):
        data = json.loads(replace(TABLE, accepted=verdict).text)
        data["accepted"] = None if edited is None else dataclasses.asdict(edited)
        (tmp_path / "table.json").write_text(json.dumps(data), encoding="utf-8")
        with pytest.raises(InvalidSettingError, match="was changed after it was written"):
            read_table(str(tmp_path / "table.json"))


def test_what_differs_is_named() -> None:
    assert TABLE.differs(TABLE.identity) is None
    newer = TABLE.differs({**TABLE.identity, "torch": "2.14.0"})
    assert newer == "torch is 2.14.0; it was measured with 2.13.0"
    assert "not there" in str(TABLE.differs({}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["ops"]["rms_norm"]["rows"][0].update(impl="x.y"), "changed after it was"),
        (lambda d: d["ops"]["rms_norm"]["rows"].reverse(), "changed after it was"),
        (lambda d: d.update(dtype="float16"), "changed after it was"),
        (lambda d: d.pop("digest"), "changed after it was"),
        (lambda d: d.update(vllm_fl_table=2), "no table of version 1; it says 2"),
        (lambda d: d.pop("identity"), "no whole table: .*identity"),
        (lambda d: d.update(colour="red"), "no whole table: .*colour"),
        (lambda d: d["ops"]["rms_norm"]["figures"][0].update(tokens=0), "was measured at 0 tokens"),
    ],
)
def test_what_was_changed_by_hand_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    data, path = json.loads(TABLE.text), tmp_path / "table.json"
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(InvalidSettingError, match=message):
        read_table(str(path))


@pytest.mark.parametrize(
    "text", ["", "[]", "null", '{"a": 1}', "[" * 100_000, TABLE.text[: len(TABLE.text) // 2]]
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(InvalidSettingError, match=r"no (whole )?table"):
        read_table(str(path))
