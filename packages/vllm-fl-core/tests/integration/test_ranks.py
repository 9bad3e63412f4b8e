"""Messages about ranks with different plans or missing packages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm_fl.integration.ranks import Opinion, lacking, plan_differences, united
from vllm_fl.plugins.inspection import FAILED, LACKED, REJECTED, Objection

KEY = ("rms_norm", "vendor.acme")


def opinion(**changed: Any) -> Opinion:
    """The opinion of a rank that plans one implementation."""
    impl = {
        "impl": "vendor.acme",
        "distribution": "fl-acme",
        "version": "1.0",
        "source": "aa",
        "kernels": {"acme-kernels": "2.0 bb"},
        **changed,
    }
    return Opinion({}, {"mode": "eager", "ops": {"rms_norm": [impl]}}, frozenset({KEY}))


NOTHING = Opinion({}, {"mode": "eager", "ops": {"rms_norm": []}}, frozenset())


def test_the_difference_is_in_the_sentence() -> None:
    for changed, words in (
        ({"version": "1.1"}, "fl-acme 1.1"),
        ({"source": "cc"}, "source cc"),
        ({"kernels": {"acme-kernels": "2.1 dd"}}, "acme-kernels 2.1 dd"),
    ):
        (line,) = plan_differences([opinion(), opinion(**changed)])
        before, _, after = line.partition("rank 1 has")
        assert words in after and words not in before
    (line,) = plan_differences([opinion(), NOTHING])
    assert line.endswith("rank 1 has none")


def test_what_one_rank_lacks_or_cannot_run_is_off_on_all() -> None:
    assert united([opinion(), opinion()], ()) == {}
    for opinions, rank in (([opinion(), NOTHING], 1), ([NOTHING, opinion()], 0)):
        assert united(opinions, ()) == {KEY: (LACKED, rank, "fl-acme 1.0", True)}
    unavailable = replace(NOTHING, installed=frozenset({KEY}), unavailable={KEY: "needs sm_120"})
    (disabled,) = united([opinion(), unavailable], ()).values()
    assert disabled == (REJECTED, 1, "it is not available on rank 1: needs sm_120", True)
    assert not united([opinion(), unavailable], {KEY})
    not_ordered_there = replace(NOTHING, installed=frozenset({KEY}))
    assert united([opinion(), not_ordered_there], ()) == {}
    vllms = {"impl": "vllm.MarlinLinearKernel", "distribution": None, "version": None}
    assert united([replace(NOTHING, contents={"ops": {"wna16_linear": [vllms]}})], ()) == {}


def test_a_row_of_an_order_by_size_is_its_ops() -> None:
    ops = {"rms_norm(<=16)": opinion().contents["ops"]["rms_norm"], "rms_norm": []}
    assert lacking([replace(opinion(), contents={"ops": ops}), NOTHING]).keys() == {KEY}


def test_of_several_objections_the_first_ranks_counts() -> None:
    one, other = Objection(FAILED, "wrong"), Objection(REJECTED, "odd", ends_strict=False)
    said = [Opinion({}), Opinion({KEY: one}), Opinion({KEY: other})]
    assert united(said, ()) == {KEY: (FAILED, 1, "wrong", True)}
