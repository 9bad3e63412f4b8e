"""`vllm-fl verify --stock`: arguments, exit status and output, without an engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from vllm_fl_tools import cli
from vllm_fl_tools.cli import _stock

Run = Callable[..., tuple[int, str]]


def row(kind: str, cls: str, **more: Any) -> dict[str, Any]:
    plain = {"against": "dequantised weights", "layers": 2, "calls": 14, "worst": 0.25}
    plain |= {"incorrect": 0, "problems": [], "skipped": {}}
    return {"kind": kind, "class": cls, **plain, **more}


RIGHT = row("QKVParallelLinear", "Marlin")
WRONG = row("RMSNorm", "forward", worst=None, incorrect=1, problems=["layer norm: it raised"])
UNKNOWN = row("Linear", "Fp4", calls=0, layers=0, worst=0.0, skipped={"unknown format: weight": 3})


@pytest.fixture
def verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    (tmp_path / "config.json").write_text("{}")

    def run(ranks: list[list[dict[str, Any]]], *arguments: str) -> tuple[int, str]:
        class Engine:
            def ask(self, kind: str, reload: bool) -> dict[str, Any]:
                assert (kind, reload) == ("stock", "--thorough" in arguments)
                return {"ranks": [{"rows": rows, "seconds": 1.5} for rows in ranks]}

        @contextmanager
        def running(name: str, model: str, options: Any, env: Any, **more: Any) -> Iterator[Engine]:
            checks = "ThoroughChecks" if "--thorough" in arguments else "StockChecks"
            assert options == {"worker_extension_cls": f"vllm_fl_verify.stock.worker.{checks}"}
            assert env["VLLM_FL_ENABLED"] == "false" and more["steps_aside"]
            assert more["arguments"] == [each for each in arguments if each == "--enforce-eager"]
            yield Engine()

        monkeypatch.setattr(_stock, "running_engine", running)
        status = cli.main(["verify", "--stock", "--model", str(tmp_path), *arguments])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


def test_without_a_finding(verify: Run) -> None:
    status, text = verify([[RIGHT, UNKNOWN]], "--enforce-eager")
    assert status == 0
    assert "Linear Fp4: 3 not compared: unknown format: weight" in text
    assert "No incorrect result: 14 calls compared in " in text


def test_a_finding_of_any_rank_is_printed_with_its_class(verify: Run) -> None:
    status, text = verify([[RIGHT], [RIGHT, WRONG]], "--thorough")
    assert status == 1
    assert "forward: incorrect: rank 1, layer norm: it raised" in text
    assert "1 of 2 rows are incorrect: 42 calls compared" in text


def test_json_joins_the_ranks(verify: Run) -> None:
    status, text = verify([[RIGHT], [{**RIGHT, "worst": 0.5}, WRONG]], "--json")
    found = json.loads(text)["stock"]
    assert (status, found["ranks"]) == (1, 2)
    rows = {each["kind"]: each for each in found["rows"]}
    assert (rows["QKVParallelLinear"]["worst"], rows["QKVParallelLinear"]["calls"]) == (0.5, 28)
    assert rows["RMSNorm"]["worst"] is None


def test_an_engine_that_compared_nothing_is_a_failure(verify: Run) -> None:
    assert verify([[UNKNOWN]])[0] == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--op", "rms_norm"), "--stock excludes --op"),
        (("--worker-extension-cls", "x.Y"), "--stock sets --worker-extension-cls"),
    ],
)
def test_arguments_that_exclude_each_other(
    arguments: tuple[str, ...], said: str, verify: Run
) -> None:
    status, text = verify([], *arguments)
    assert status == 2 and said in text


@pytest.mark.parametrize("arguments", [("--enforce-eager",), ("--thorough",), ("--model", "x")])
def test_its_arguments_need_stock(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", *arguments]) == 2
    assert "need --stock" in capsys.readouterr().err
