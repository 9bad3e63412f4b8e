"""What is said of ranks whose plans differ, and what one of them lacks."""

from __future__ import annotations

import multiprocessing
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_fl.engine.tables import Standing
from vllm_fl.integration.ranks import (
    LACKED,
    REFUSES,
    REJECTED,
    Disabled,
    Ran,
    Verdict,
    agree,
    common_table,
    differences,
    gathered,
    lacking,
    refusing,
)


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


def test_what_one_rank_lacks_is_found_on_every_rank() -> None:
    has = frozenset({("rms_norm", "vendor.acme"), ("rms_norm", "reference.torch")})
    first = replace(found(0), installed=has)
    bare = Verdict(
        1, facts={"ops": {"rms_norm": []}}, installed=has - {("rms_norm", "vendor.acme")}
    )
    for verdicts in ([first, bare], [replace(bare, rank=0), replace(first, rank=1)]):
        lacks = {v.rank for v in verdicts if ("rms_norm", "vendor.acme") not in v.installed}
        assert lacking(verdicts) == {("rms_norm", "vendor.acme"): (LACKED, *lacks, "fl-acme 1.0")}


def test_an_implementation_that_refuses_on_every_rank_is_rejected() -> None:
    key = ("rms_norm", "vendor.acme")
    refuses = Ran({key: "odd"}, frozenset(), frozenset(), frozenset())
    serves = replace(refuses, refused={}, served=frozenset({key}))
    for other, out in ((refuses, True), (serves, False), (None, False)):
        verdicts = [replace(found(0), ran=refuses), replace(found(1), ran=other)]
        why = f"{REFUSES} (odd)"
        assert refusing(verdicts) == ({key: Disabled(REJECTED, 0, why)} if out else {})


def test_a_row_of_an_order_by_size_is_its_ops() -> None:
    ops = {"rms_norm(<=16)": found(0).facts["ops"]["rms_norm"], "rms_norm": []}
    one = Verdict(0, facts={"ops": ops}, installed=frozenset({("rms_norm", "vendor.acme")}))
    assert lacking([one, Verdict(1)]) == {("rms_norm", "vendor.acme"): (LACKED, 1, "fl-acme 1.0")}
    assert lacking([one, replace(one, rank=1)]) == {}


def test_a_table_applies_only_if_all_ranks_have_it() -> None:
    mine, lacking_rows = Standing("f00d"), Standing("f00d", left_out={"rms_norm": "not installed"})
    for other, words in (
        (Standing("beef"), "rank 1 has beef"),
        (Standing(reason="device is H200"), "device is H200"),
        (Standing(), "rank 1 has none"),
    ):
        common = common_table([replace(found(0), table=mine), replace(found(1), table=other)])
        assert not common.digest and "rank 0 has f00d" in common.reason
        assert words in common.reason and common.fault.startswith("strict mode, and The ranks have")
    both = [replace(found(0), table=mine), replace(found(1), table=lacking_rows)]
    assert common_table(both) == lacking_rows
    assert lacking_rows.fault == "strict mode, and the table's rows of op 'rms_norm': not installed"


def test_a_verdict_has_the_number_of_its_rank_in_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of data-parallel engines are rank 0 of their own one each."""
    import torch.distributed as dist

    group = SimpleNamespace(world_size=2, rank=1, cpu_group=None)
    state = SimpleNamespace(get_world_group=lambda: group)
    for name in ("vllm", "vllm.distributed", "vllm.distributed.parallel_state"):
        monkeypatch.setitem(sys.modules, name, state)

    def gather(verdicts: list[Any], mine: Verdict, group: object) -> None:
        verdicts[:] = [found(0), mine]

    monkeypatch.setattr(dist, "monitored_barrier", lambda *_, **__: None)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    assert [verdict.rank for verdict in agree(found(0))] == [0, 1]


def _of_three(rank: int, folder: Path, begin: Any, told: Any) -> None:
    """One process of three, of which the last one dies before the others begin."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=3)
    if rank == 2:
        os._exit(7)
    begin.wait(300)
    try:
        gathered(rank, dist.group.WORLD, 3, rank, "agree")
    except RuntimeError as error:
        told.put((rank, str(error)))
        told.close()
        told.join_thread()
    os._exit(0)


def test_a_rank_that_died_before_the_others_came_is_named(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    begin, told = context.Event(), context.Queue()
    ranks = [context.Process(target=_of_three, args=(n, tmp_path, begin, told)) for n in range(3)]
    for each in ranks:
        each.start()
    ranks[2].join(300)
    begin.set()
    said = dict(told.get(timeout=300) for _ in range(2))
    for each in ranks:
        each.join(300)
    assert [each.exitcode for each in ranks] == [0, 0, 7]
    waited = "rank 0 waited for the other ranks to agree, and one of them is gone (rank 2): "
    assert waited in said[0]
    assert "rank 2" in said[1]
