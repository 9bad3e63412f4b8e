"""The search for the part that makes a startup fail, and the settings that exclude it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from vllm_fl_tools.cli._bisect_startups import VLLM_FL, Startups, fault
from vllm_fl_tools.cli._engines import EngineError
from vllm_fl_tools.cli._parts import Changes, Parts

NAMES = [f"op{n}" for n in range(400)]
LISTED = {
    "plugins": {
        "acme": {"release": "acme 1.0", "module": False},
        "other": {"release": "other 2.0", "module": True},
    },
    "lists": {"acme_off": {"variable": "ACME_OFF", "names": ["mine"], "allows": False}},
    "parts": [
        {"kind": "neighbour", "name": "bolt", "what": "b"},
        {"kind": "neighbour", "name": "nut", "what": "n"},
        {"kind": "setting", "name": "strict", "what": "s", "variable": "VLLM_FL_STRICT"},
        {"kind": "op", "name": "rms_norm", "what": "n", "of": "acme", "order": ["stock"]},
        {"kind": "op", "name": "relu2", "what": "r", "of": "other", "order": ["stock"]},
        *(
            {"kind": "name", "name": n, "what": n, "of": "acme", "setting": "acme_off"}
            for n in NAMES
        ),
    ],
}
SCORE = {"tokens": [[1]], "prefill": [[-1.0, -2.0]], "decode": [[-1.0]]}

Fails = Callable[[Collection[str], bool], bool]


class Engines:
    """Engines that fail with this log, or hang, if `fails(excluded parts, whether launches block)`;
    with `wrong` they return that score instead. `stock`: whether stock vLLM may fail too."""

    def __init__(
        self,
        fails: Fails,
        log: str = "",
        hung: bool = False,
        wrong: dict[str, Any] | None = None,
        stock: bool = False,
    ) -> None:
        self._fails, self._log, self._hung, self._wrong = fails, log, hung, wrong
        self._stock = stock
        self.tried: list[Collection[str]] = []

    def __call__(
        self, name: str, off: Collection[str], blocking: bool, limit: float | None
    ) -> dict[str, Any]:
        is_stock = VLLM_FL in off
        self.tried.append(off)
        assert is_stock or limit is not None
        if (is_stock and not self._stock) or not self._fails(off, blocking):
            return SCORE
        if self._wrong is None:
            raise EngineError("failed", log=self._log, hung=self._hung)
        return self._wrong


@pytest.fixture
def parts() -> Parts:
    return Parts(LISTED)


def off(number: int) -> str:
    return f"acme_off op{number}"


@pytest.mark.parametrize("number", [0, 57, 399])
def test_one_of_four_hundred_takes_few_startups(parts: Parts, number: int) -> None:
    engines = Engines(lambda out, _: off(number) not in out)
    status, (culprit,) = Startups(parts, engines).search()
    assert status == "found" and culprit.parts == (off(number),)
    assert len(engines.tried) <= math.ceil(math.log2(len(parts.by_key))) + 4
    assert {off(number)} in engines.tried, "an engine without the culprit has started"


def test_a_part_in_the_log_is_tried_first(parts: Parts) -> None:
    log = """Traceback (most recent call last):
  File "/x/acme/kernels.py", line 3, in op57
    launch()
RuntimeError: boom
"""
    engines = Engines(lambda out, _: off(57) not in out, log)
    _, (culprit,) = Startups(parts, engines).search()
    assert culprit.parts == (off(57),) and culprit.verdict.why == "RuntimeError: boom"
    assert len(engines.tried) == 5  # stock, as set, with its plugin, the plugin, all others


@pytest.mark.parametrize("key", ["plugin acme", "op rms_norm", "setting strict"])
def test_each_kind_of_part_is_found(parts: Parts, key: str) -> None:
    _, (culprit,) = Startups(parts, Engines(lambda out, _: key not in out)).search()
    assert culprit.parts == (key,)


@pytest.mark.parametrize("stock", [True, False])
def test_a_neighbour_is_found_with_vllm_fl_and_without(parts: Parts, stock: bool) -> None:
    engines = Engines(lambda out, _: "neighbour bolt" not in out, stock=stock)
    status, (culprit,) = Startups(parts, engines).search()
    assert status == "found" and culprit.parts == ("neighbour bolt",)
    assert all((VLLM_FL in out) is stock for out in engines.tried[1:])
    engines = Engines(lambda out, _: True, stock=True)
    status, (culprit,) = Startups(parts, engines).search()
    assert status == "stock" and not culprit.parts and len(engines.tried) == 2


@pytest.mark.parametrize("value", [math.nan, -9.0, None])
def test_a_startup_that_is_wrong_or_hangs(parts: Parts, value: float | None) -> None:
    wrong = value and {"tokens": [[1]], "prefill": [[-1.0, value]], "decode": [[value]]}
    engines = Engines(lambda out, _: off(9) not in out, hung=not wrong, wrong=wrong or None)
    _, (culprit,) = Startups(parts, engines).search()
    assert (culprit.parts, culprit.verdict.how) == ((off(9),), "wrong" if wrong else "hung")


def test_a_failure_that_blocking_launches_hide(parts: Parts) -> None:
    search = Startups(parts, Engines(lambda out, blocking: off(9) not in out and not blocking))
    assert search.search()[1][0].parts == (off(9),) and not search.blocking


def test_failures_without_a_part(parts: Parts) -> None:
    assert Startups(parts, Engines(lambda out, _: True)).search()[0] == "elsewhere"
    engines = Engines(lambda out, _: len(engines.tried) == 2)  # only the first startup as set
    assert Startups(parts, engines).search()[0] == "unsteady"


def test_the_settings_without_some_parts(parts: Parts) -> None:
    changes = parts.changes({off(3), "op rms_norm", "setting strict"})
    user = {"VLLM_FL_STRICT": "1", "PATH": "/bin", "VLLM_FL_PER_OP": "relu2=vendor;rms_norm=acme"}
    assert changes.applied(user, "") == {
        "PATH": "/bin",
        "ACME_OFF": "mine,op3",
        "VLLM_FL_PER_OP": "relu2=vendor;rms_norm=stock",
    }
    assert changes.described(user) == [
        "unset VLLM_FL_STRICT",
        "export ACME_OFF=mine,op3",
        "export VLLM_FL_PER_OP='relu2=vendor;rms_norm=stock'",
    ]
    only = parts.changes(parts.without({"op relu2"})).applied({}, "")
    assert not {"bolt", "nut"} & {*only.pop("VLLM_PLUGINS").split(",")}
    assert only == {"VLLM_FL_PLUGINS": "", "VLLM_FL_PER_OP": "rms_norm=stock"}


def test_the_users_file_is_changed_in_a_copy(parts: Parts, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("strict: true\nop_backends:\n  relu2: [vendor]\n")
    changes = parts.changes({off(3), "op rms_norm", "setting strict"})
    copy = tmp_path / "copy"
    copy.mkdir()
    applied = changes.applied({"VLLM_FL_CONFIG": str(own)}, str(copy))
    assert json.loads(Path(applied["VLLM_FL_CONFIG"]).read_text()) == {
        "op_backends": {"relu2": ["vendor"], "rms_norm": ["stock"]},
        "acme_off": ["mine", "op3"],
    }
    assert f"{own}: strict: (remove it)" in changes.described({"VLLM_FL_CONFIG": str(own)})
    orders = tmp_path / "orders.json"
    orders.write_text('{"relu2": ["vendor"]}')
    applied = Changes({"relu2": ["stock"]}).applied({"VLLM_FL_OP_CONFIG": str(orders)}, str(copy))
    assert json.loads(Path(applied["VLLM_FL_OP_CONFIG"]).read_text()) == {"relu2": ["stock"]}


def test_an_answer_like_that_of_stock_is_right() -> None:
    near = {"tokens": [[2]], "prefill": [[-1.05, -1.95]], "decode": [[-1.1]]}
    assert fault(SCORE, near) == ""
