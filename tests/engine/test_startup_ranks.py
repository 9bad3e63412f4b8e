"""The shared engine of two ranks, through vLLM's executor: both agree on one plan."""

from __future__ import annotations

from pathlib import Path

from engines import difference
from startups import VENDOR_SHARE, Startup


def test_a_kernel_that_is_wrong_on_one_rank_is_off_on_both(startup: Startup) -> None:
    result = startup("ranks")
    first, second = result["report"]
    assert [first["rank"], second["rank"]] == [0, 1]
    assert first["digest"] == second["digest"]
    for report in (first, second):
        assert report["ops"]["silu_and_mul"]["impl"] == "reference.torch"
        assert "on rank 1" in report["demotions"]["silu_and_mul"]["vendor.rankone"]
    named = "Implementation 'vendor.rankone' failed for op 'silu_and_mul'"
    lines = [line for line in result["log"].splitlines() if named in line]
    assert len(lines) == 1 and "on rank 1; disabled on all ranks" in lines[0]


def test_a_communicator_that_is_wrong_on_one_rank_gives_way_to_the_next(startup: Startup) -> None:
    result = startup("ranks")
    log = result["log"]
    named = "Implementation 'vendor.wrong' failed for op 'communicator': all_reduce"
    (line,) = [line for line in log.splitlines() if named in line]
    assert "on rank 1; disabled on all ranks" in line
    for report in result["report"]:
        assert "on rank 1" in report["demotions"]["communicator"]["vendor.wrong"]
        assert report["ops"]["communicator"]["impl"] == "vendor.counting"
        assert report["groups"]["tp:0"] == "vendor.counting"
        assert f"communicators: rank {report['rank']} reduces" in log


def test_two_ranks_are_near_stock(startup: Startup) -> None:
    assert 0.0 < difference(startup("stock"), startup("ranks")) <= VENDOR_SHARE


def test_a_call_that_an_implementation_refuses_while_it_serves_falls_back(startup: Startup) -> None:
    result = startup("ranks")
    for report in result["report"]:
        assert report["ops"]["rms_norm"]["impl"] == "vendor.late"
        assert report["fallbacks"]["rms_norm"]["reference.torch"] > 0
        assert "rms_norm" not in report["demotions"]
    log = result["log"]
    refused = "'vendor.late' does not support a call of op 'rms_norm': NotImplementedError: not"
    assert log.count(refused) == log.count("Op 'rms_norm' fallback to 'reference.torch'") == 2


def test_each_rank_keeps_its_own_faults(startup: Startup, shared: Path) -> None:
    startup("ranks")
    late = {f"rms_norm.vendor.late.rank{rank}.safetensors" for rank in range(2)}
    wrong = {"silu_and_mul.vendor.rankone.rank1.safetensors"}
    assert {file.name for file in (shared / "ranks").iterdir()} == late | wrong
