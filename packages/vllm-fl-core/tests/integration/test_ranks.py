"""What is said of ranks whose plans differ."""

from __future__ import annotations

from typing import Any

from vllm_fl.integration.ranks import Verdict, differences


def found(rank: int, **changed: Any) -> Verdict:
    impl = {
        "impl": "vendor.acme",
        "distribution": "fl-acme",
        "version": "1.0",
        "source": "aa",
        "kernels": {"acme-kernels": "2.0 bb"},
        **changed,
    }
    return Verdict(rank, facts={"mode": "eager", "ops": {"rms_norm": [impl]}})


def test_ranks_that_agree_are_not_named() -> None:
    assert differences([found(0), found(1)]) == []


def test_the_difference_is_in_the_sentence() -> None:
    for changed, words in (
        ({"version": "1.1"}, "fl-acme 1.1"),
        ({"source": "cc"}, "source cc"),
        ({"kernels": {"acme-kernels": "2.1 dd"}}, "acme-kernels 2.1 dd"),
    ):
        (line,) = differences([found(0), found(1, **changed)])
        before, _, after = line.partition("rank 1 has")
        assert words in after and words not in before


def test_a_rank_without_the_plugin() -> None:
    other = Verdict(1, facts={"mode": "eager", "ops": {"rms_norm": []}})
    (line,) = differences([found(0), other])
    assert line.endswith("rank 1 has none")


def test_a_row_that_one_rank_has_alone_is_named() -> None:
    facts = found(1).facts
    rows = {**facts["ops"], "rms_norm(<=16)": facts["ops"]["rms_norm"]}
    other = Verdict(1, facts={**facts, "ops": rows})
    for one, two, words in ((found(0), other, "rank 0 has none"), (other, found(0), "none")):
        (line,) = differences([one, two])
        assert line.startswith("rms_norm(<=16): ") and words in line
