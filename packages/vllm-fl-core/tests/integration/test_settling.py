"""Settling on a plan: a rank's error reaches all, and each moment has its consequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from builders import engine_of, managing, plan_of, planning, rank_failed, silu

from vllm_fl.errors import StartError
from vllm_fl.integration import engines, settling
from vllm_fl.integration.ranks import Opinion
from vllm_fl.plugins.inspection import FAILED, Moment, Objection
from vllm_fl.settings.devices import Table

KEY = ("silu_and_mul", "vendor.acme")


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The failures that this rank reports to the others."""
    found: list[str] = []

    def exchange(what: str, mine: Any, failure: str = "") -> list[Any]:
        if failure:
            found.append(failure)
            raise rank_failed(f"rank 0: {failure}")
        return [mine]

    monkeypatch.setattr(engines, "exchange", exchange)
    monkeypatch.setattr(settling, "_patchers_object", lambda *_: {})
    monkeypatch.setattr(settling, "_disable", lambda engine, _, new: engine.disabled.update(new))
    return found


def inspecting(monkeypatch: pytest.MonkeyPatch, answer: Any, **policy: Any) -> Any:
    """An engine with a verifier that returns or raises `answer`, and its calls in `asked`."""

    def inspect(engine: Any, moment: Moment, *, verifies: bool) -> Any:
        engine.asked.append(verifies)
        if isinstance(answer, BaseException):
            raise answer
        return dict(answer) if verifies else {}

    monkeypatch.setattr(settling, "collect_objections", inspect)
    engine = engine_of(planning(managing(silu("vendor.acme"), **policy)))
    vars(engine.facts.settings)["policy"] = managing(silu("vendor.acme"), **policy).policy
    engine.asked, engine.contents = [], {"ops": {}}
    return engine


def exchanging(monkeypatch: pytest.MonkeyPatch, answer: Callable[[Any], list[Any]]) -> None:
    """Replace the exchange: `answer` returns the opinions of all ranks."""
    monkeypatch.setattr(engines, "exchange", lambda what, mine, failure="": answer(mine))


class Differs(StartError):
    """Says more than a StartError."""


@pytest.mark.parametrize(
    ("error", "stays", "reported"),
    [
        (SystemExit(3), False, ["SystemExit: 3"]),
        (RuntimeError("boom"), False, ["RuntimeError: boom"]),
        (StartError("boom"), False, ["boom"]),
        (Differs("boom"), True, ["boom"]),
        (rank_failed("rank 1: gone"), True, []),  # all ranks know it
    ],
    ids=repr,
)
def test_whatever_a_rank_raises_ends_the_startup_on_all(
    error: BaseException, stays: bool, reported: list[str], sent: list[str], monkeypatch: Any
) -> None:
    with pytest.raises(StartError) as raised:
        settling.settle(inspecting(monkeypatch, error), Moment.LOADED)
    assert (raised.value is error, sent) == (stays, reported)
    assert stays or str(raised.value).startswith("vllm-fl: engine startup failed: rank 0: ")


def test_an_objection_ends_a_strict_startup_if_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    disabled: list[Any] = []

    def disable(engine: Any, moment: Moment, new: Any) -> None:
        disabled.append(new)
        engine.disabled |= new

    monkeypatch.setattr(settling, "_disable", disable)
    variant = {KEY: Objection("FL412", "not batch-invariant", ends_strict=False)}
    assert settling.settle(inspecting(monkeypatch, variant, strict=True), Moment.LOADED) == {}
    assert [*disabled[0]] == [KEY]
    wrong = {KEY: Objection(FAILED, "it is wrong")}
    with pytest.raises(StartError, match="in strict mode: rank 0: implementation"):
        settling.settle(inspecting(monkeypatch, wrong, strict=True), Moment.LOADED)
    found = settling.settle(inspecting(monkeypatch, wrong), Moment.UPDATED)
    assert found == {KEY: "it is wrong (found on rank 0)"} and len(disabled) == 1


def test_verifiers_are_asked_if_no_rank_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    veto = Opinion({KEY: Objection(FAILED, "vetoed")})
    engine = inspecting(monkeypatch, {})
    exchanging(monkeypatch, lambda mine: [mine, veto if len(engine.asked) == 1 else mine])
    settling.settle(engine, Moment.LOADED)
    assert engine.asked == [False, False, True] and engine.disabled[KEY].rank == 1


def test_remarks_are_of_the_last_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def inspect(engine: Any, moment: Moment, *, verifies: bool) -> Any:
        if verifies:
            engine.remarks[moment].append("seed 1")
        return {KEY: Objection(FAILED, "it is wrong")} if verifies else {}

    engine = inspecting(monkeypatch, {})
    monkeypatch.setattr(settling, "collect_objections", inspect)
    settling.settle(engine, Moment.LOADED)
    assert engine.remarks[Moment.LOADED] == ["seed 1"]


def test_a_table_that_one_rank_cannot_use_is_dropped_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank decides by the tables of all, so none verifies while another plans again."""
    made: list[Any] = []
    engine = inspecting(monkeypatch, {})
    settings = replace(engine.facts.settings, tuned=Table("t.yaml"))
    engine.facts, other = replace(engine.facts, settings=settings), "the device is H100"
    exchanging(monkeypatch, lambda mine: [mine, mine if made else replace(mine, table=other)])
    monkeypatch.setattr(settling, "set_plan", made.append)
    settling.settle(engine, Moment.PLANNED)
    assert made == [engine] and engine.asked == [False, False, True]
    table = engine.facts.settings.tuned
    assert table is not None and table.unused == "the device is H100 (on rank 1)"


def test_a_rank_without_a_verifier_ends_the_startup(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, more = inspecting(monkeypatch, {}), {"acme-verify"}
    exchanging(monkeypatch, lambda mine: [replace(mine, verifiers=mine.verifiers | more), mine])
    with pytest.raises(StartError, match=r"acme-verify is missing on rank 1\. Install it"):
        settling.settle(engine, Moment.PLANNED)


def test_ranks_that_chose_differently_by_timing_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their plans and digests are equal."""
    picks: dict[Any, Any] = {64: "tiles of 128", 512: "tiles of 64"}
    opinions: list[Any] = []

    impls = silu("vendor.acme", choices=lambda: picks), silu("vendor.broken", choices=lambda: 1 / 0)
    engine = engine_of(plan_of(*impls, order=["vendor"]))
    # The other rank returns this rank's first choices.
    exchanging(monkeypatch, lambda mine: opinions.append(mine) or [mine, opinions[0]])
    monkeypatch.setattr(settling, "collect_objections", lambda *_, **__: {})
    settling.settle(engine, Moment.CACHED)
    assert not caplog.records
    picks[64] = "tiles of 32"
    settling.settle(engine, Moment.CACHED)
    (line,) = caplog.messages
    assert line == (
        "The ranks differ. silu_and_mul=vendor.acme chose by timing: rank 0 has "
        "{'64': 'tiles of 32'}, rank 1 has {'64': 'tiles of 128'} [FL503]"
    )
    assert settling.choices(engine.plan) == {
        KEY: {"64": "tiles of 32", "512": "tiles of 64"},
        ("silu_and_mul", "vendor.broken"): "choices() raised ZeroDivisionError: division by zero",
    }
