"""What `vllm-fl rescue` concludes from answers of engines, and how few it starts. None runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from vllm_fl_tools.cli._engines import EngineError
from vllm_fl_tools.cli._rescuing import AS_ASKED, STOCK, Rescue, fault
from vllm_fl_tools.cli._suspects import Suspects

NAMES = [f"op{n}" for n in range(400)]
LISTED = {
    "settings": [
        {"key": "strict", "named": "VLLM_FL_STRICT=1", "variable": "VLLM_FL_STRICT", "value": "1"}
    ],
    "plugins": {
        "acme": {"release": "acme 1.0", "keys": ["vendor_acme_off"], "module": False},
        "other": {"release": "other 2.0", "keys": [], "module": True},
    },
    "ops": [
        {"op": "rms_norm", "impls": ["vendor.acme"], "plugin": "acme", "without": ["stock"]},
        {"op": "relu2", "impls": ["vendor.other"], "plugin": "other", "without": ["stock"]},
    ],
    "lists": [
        {
            "plugin": "acme",
            "key": "vendor_acme_off",
            "what": "operator",
            "whitelist": None,
            "variable": None,
            "whitelisted": None,
            "names": NAMES,
        }
    ],
    "file": {"strict": True, "vendor_acme_off": ["mine"], "op_backends": {"relu2": ["vendor"]}},
    "covered": ["VLLM_FL_STRICT", "VLLM_FL_PREFER"],
    "environment": {},
}
SCORE = {"tokens": [[1]], "prefill": [[-1.0, -2.0]], "decode": [[-1.0]]}
USER = {"VLLM_FL_STRICT": "1", "PATH": "/bin"}

Fails = Callable[[frozenset[str], bool], bool]


def off(number: int) -> str:
    return f"vendor_acme_off op{number}"


class Engines:
    """Engines that fail as told, each counted.

    Args:
        fails: (the parts that are on, whether launches block) -> whether it ends.
        log: its log where it does.
        hung: whether it hangs then.
        wrong: its score where it does not.
        stock: whether stock fails, too.
    """

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
        self.asked: list[frozenset[str]] = []

    def __call__(
        self, kind: str, on: frozenset[str], blocking: bool, limit: float | None
    ) -> dict[str, Any]:
        self.asked.append(on)
        assert (limit is None) == (kind == STOCK)
        if self._stock if kind == STOCK else self._fails(on, blocking):
            if self._wrong is None:
                raise EngineError("failed", log=self._log, hung=self._hung)
            return self._wrong
        return SCORE


@pytest.fixture
def suspects() -> Suspects:
    return Suspects(LISTED, USER)


def rescued(suspects: Suspects, engines: Engines) -> Any:
    return Rescue(suspects, engines).run()


@pytest.mark.parametrize("number", [0, 57, 399])
def test_one_of_four_hundred_is_named_by_few_starts(suspects: Suspects, number: int) -> None:
    engines = Engines(lambda on, _: off(number) in on)
    finding = rescued(suspects, engines)
    (culprit,) = finding.culprits
    assert finding.status == "found" and culprit.parts == (off(number),)
    assert finding.starts == len(engines.asked) <= math.ceil(math.log2(len(suspects.parts))) + 4
    assert finding.rest == {*suspects.parts} - {off(number)}
    assert finding.rest in engines.asked, "the settings that are written were started"


def test_what_the_log_names_is_tried_first(suspects: Suspects) -> None:
    log = """Traceback (most recent call last):
  File "/x/acme/kernels.py", line 3, in op57
    launch()
RuntimeError: boom
"""
    finding = rescued(suspects, Engines(lambda on, _: off(57) in on, log))
    (culprit,) = finding.culprits
    assert culprit.parts == (off(57),) and culprit.why == "RuntimeError: boom"
    assert finding.starts == 5  # stock, as asked, it with its plugin, the plugin, all others


@pytest.mark.parametrize("key", ["plugin acme", "op rms_norm", "setting strict"])
def test_each_kind_of_part_is_named(suspects: Suspects, key: str) -> None:
    finding = rescued(suspects, Engines(lambda on, _: key in on))
    (culprit,) = finding.culprits
    assert culprit.parts == (key,)
    gone = {key, *suspects.beneath.get(key, ())}
    assert finding.rest == {*suspects.parts} - gone


@pytest.mark.parametrize("value", [math.nan, -9.0, None])
def test_a_start_that_is_wrong_or_hangs_is_named(suspects: Suspects, value: float | None) -> None:
    wrong = value and {"tokens": [[1]], "prefill": [[-1.0, value]], "decode": [[value]]}
    engines = Engines(lambda on, _: off(9) in on, hung=not wrong, wrong=wrong or None)
    (culprit,) = rescued(suspects, engines).culprits
    assert (culprit.parts, culprit.how) == ((off(9),), "wrong" if wrong else "hung")


def test_a_failure_that_blocking_launches_hide_is_found_without(suspects: Suspects) -> None:
    finding = rescued(suspects, Engines(lambda on, blocking: off(9) in on and not blocking))
    (culprit,) = finding.culprits
    assert culprit.parts == (off(9),) and not finding.blocking


def test_vllm_fl_fails_without_any_part(suspects: Suspects) -> None:
    assert rescued(suspects, Engines(lambda on, _: True)).status == "elsewhere"


def test_a_failure_that_comes_and_goes_is_told_as_that(suspects: Suspects) -> None:
    engines = Engines(
        lambda on, _: len(engines.asked) == 2
    )  # the first start as asked, and no other
    assert rescued(suspects, engines).status == "unsteady"


def test_what_an_engine_without_some_parts_is_started_with(suspects: Suspects) -> None:
    every = {*suspects.parts}
    file, environment = suspects.started_with(every - {off(3), "op rms_norm", "setting strict"})
    assert file == {
        "vendor_acme_off": ["mine", "op3"],
        "op_backends": {"relu2": ["vendor"], "rms_norm": ["stock"]},
    }
    assert environment == {"PATH": "/bin"}  # the file says the rest
    assert suspects.beside(every - {"setting strict"}) == ["unset VLLM_FL_STRICT"]
    assert suspects.beside(every - {off(3)}) == []
    file, environment = suspects.started_with({"op relu2"})
    assert "vendor_acme_off" not in file  # its plugin is not loaded
    assert environment == {"PATH": "/bin", "VLLM_FL_PLUGINS": ""}


def test_an_answer_like_stock_s_is_right() -> None:
    near = {"tokens": [[2]], "prefill": [[-1.05, -1.95]], "decode": [[-1.1]]}
    assert fault(SCORE, near) == ""
    assert AS_ASKED != STOCK
