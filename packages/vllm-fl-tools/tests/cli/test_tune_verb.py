"""`vllm-fl tune`."""

from __future__ import annotations

import errno
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Command, Plugin

from vllm_fl.contracts import ModelSizes
from vllm_fl.settings.loading import load_settings
from vllm_fl_tools.atomic_write import Draft
from vllm_fl_tools.cli import _tuning, tune
from vllm_fl_tools.cli._tuning import TuningSubject
from vllm_fl_tools.engine import bench, tuning
from vllm_fl_tools.engine.tuning_table import Row, Tuned

CLOCKED = """
NOW, CALLS = [0.0], []

def timed(name, us, wrong_at=(), above=None):
    def fn(x):
        NOW[0] += (us if above is None or len(x) <= 100 else above) * 1e-6
        CALLS.append((name, len(x)))
        result = silu_and_mul(x)
        if len(x) in wrong_at:
            result[-1, -1] += 100
        return result
    return act(name, fn)

@hookimpl
def register_ops():
    return [timed("acme", 30), timed("fast", 10, (16,), 29.7), timed("slow", 90)]
"""

SIZES = ("--model", "tiny")
ONE_OP = ("--device", "cpu", "--op", "silu_and_mul")
BESIDE = ("--impl", "vendor.fast", "--impl", "vendor.slow")
QUICK = (*SIZES, *ONE_OP, *BESIDE, "--json")


def subject(
    arguments: Any, asked: tuple[int, ...], bindings: Any, device: torch.device, **more: int
) -> TuningSubject:
    """A model of these sizes; normally vLLM reads them from its folder."""
    tokens = asked or tuple(1 << n for n in range(10))
    sizes = ModelSizes(**(more or {"intermediate": 8}), tokens=(1, tokens[-1]))
    dtype = torch.float32
    return TuningSubject("tiny", sizes, tokens, "eager", dtype, device, frozenset())


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and small caches that are flushed at once."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    for module in (bench, tuning):
        monkeypatch.setattr(module, "cold_bytes", lambda device: 1024)
    monkeypatch.setattr(tune, "_subject", subject)
    return work


@pytest.fixture
def clocked(plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A plugin with kernels that advance the clock; returns its module, once loaded."""
    name = plugin(CLOCKED)
    monkeypatch.setattr(_tuning, "CLOCK", lambda: sys.modules[name].NOW[0])
    return lambda: sys.modules[name]


def result(done: Any) -> Tuned:
    return Tuned.of(done.json()["table"])


class TestTable:
    def test_a_kernel_that_is_wrong_at_one_size_and_slower_above_100_tokens(
        self, fl: Command, clocked: Any
    ) -> None:
        done = fl("tune", *QUICK, "--out", "t.yaml")
        assert done.status == 0, done.err
        tuned = result(done).ops["silu_and_mul"]
        sizes = sorted({figure.tokens for figure in tuned.figures})
        assert sizes == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
        assert done.json()["measurements"] == len(sizes)
        assert tuned.default == "vendor.acme"
        assert [(row.up_to, row.impl) for row in tuned.rows] == [
            *((8, "vendor.fast"), (16, "default"), (64, "vendor.fast"), (512, "default"))
        ]
        assert ("fast", 64) in clocked().CALLS, "it is checked at the end of its row"
        (rejected,) = [f for f in tuned.figures if f.rejected]
        assert (rejected.tokens, rejected.impl, rejected.us) == (16, "vendor.fast", None)
        assert "1 of 128 elements exceed the tolerance; worst at" in rejected.rejected
        assert clocked().CALLS.count(("fast", 16)) == 1  # by the check, not timed
        assert rejected.rejected in done.out

    def test_what_it_says_of_the_machine_and_the_model(
        self, fl: Command, clocked: Any, here: Path
    ) -> None:
        done = fl("tune", *QUICK, "--tokens", "8", "--out", "t.yaml")
        answer, table = done.json(), result(done)
        assert os.listdir(here) == ["t.yaml"], "nothing else"
        assert (table.mode, table.dtype, table.model) == ("eager", "float32", "tiny")
        assert table.sizes["intermediate"] == 8
        assert "hidden" not in table.sizes
        assert table.holds["device"] == "cpu" and "torch" in table.holds["distributions"]
        figures = {f.impl: f for f in table.ops["silu_and_mul"].figures}
        assert {name: f.us for name, f in figures.items()} == pytest.approx(
            {"vendor.acme": 30, "vendor.fast": 10, "vendor.slow": 90}
        )
        assert {figure.n for figure in figures.values()} == {tuning.ROUNDS}
        assert (answer["path"], answer["remarks"]) == (str(here / "t.yaml"), [])
        settings = load_settings({"VLLM_FL_TABLE": answer["path"]})
        (order,) = settings.by_device["silu_and_mul"]
        assert settings.tuned is not None and settings.tuned.device == "cpu"
        assert str(order).startswith("on cpu: eager <=8 impl:vendor.fast, rest impl:vendor.acme")
        assert "3 times as fast in vendor.fast by vendor.acme at 8 tokens" in str(order)

    def test_two_runs_agree(self, fl: Command, clocked: Any) -> None:
        arguments = ("tune", *QUICK, "--tokens", "1,16", "--out")
        tables = [result(fl(*arguments, name)) for name in ("a.yaml", "b.yaml")]
        first, second = (table.ops["silu_and_mul"] for table in tables)
        assert first.rows == second.rows and tables[0].holds == tables[1].holds
        assert [f.us for f in first.figures] == [f.us for f in second.figures]

    def test_a_denied_vendor_is_no_candidate(self, fl: Command, clocked: Any) -> None:
        more = {"VLLM_FL_DENY_VENDORS": "fast"}
        done = fl("tune", *QUICK, "--tokens", "8", "--out", "t.yaml", **more)
        tuned = result(done).ops["silu_and_mul"]
        assert {f.impl for f in tuned.figures} == {"vendor.acme", "vendor.slow"}
        assert ("fast", 8) not in clocked().CALLS

    def test_one_that_no_list_names_is_a_candidate(self, fl: Command, clocked: Any) -> None:
        more = {"VLLM_FL_PER_OP": "silu_and_mul=impl:vendor.slow"}
        done = fl("tune", *QUICK, "--tokens", "8", "--out", "t.yaml", **more)
        tuned = result(done).ops["silu_and_mul"]
        assert (tuned.default, tuned.rows) == ("vendor.slow", (Row(8, "vendor.fast"),))

    def test_each_measurement_has_a_line(self, fl: Command, clocked: Any) -> None:
        done = fl("tune", *QUICK, "--tokens", "1,16", "--out", "t.yaml")
        lines = [line for line in done.err.splitlines() if line.startswith("[")]
        assert [line.partition(":")[0] for line in lines] == [
            "[ 50 %] silu_and_mul, 1 tokens",
            "[100 %] silu_and_mul, 16 tokens",
        ]
        assert "vendor.fast 10.0 µs, 3.00 times as fast as vendor.acme" in lines[0]
        assert "rejected: vendor.fast" in lines[1]

    def test_the_default_name_is_not_replaced(self, fl: Command, clocked: Any, here: Path) -> None:
        name = "vllm-fl-table.yaml"
        assert fl("tune", *QUICK, "--tokens", "8").status == 0
        before = (here / name).read_text()
        done = fl("tune", *QUICK, "--tokens", "8")
        assert (done.status, done.out) == (2, "")
        assert f"{name} exists: --out {name} overwrites it" in done.err
        assert (here / name).read_text() == before
        assert fl("tune", *QUICK, "--tokens", "16", "--out", name).status == 0
        assert (here / name).read_text() != before


class TestBadArguments:
    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (("--op", "silu_and_mull"), "--op silu_and_mull: unknown op"),
            (("--impl", "vendor.acne"), "--impl vendor.acne: unknown impl"),
            (("--tokens", "1,x"), "--tokens 1,x: expected numbers"),
            (("--tokens", "0"), "--tokens 0: expected numbers"),
            (("--tokens", "1,,2"), "--tokens 1,,2: expected numbers"),
            (("--device", "abacus"), "--device abacus: "),
            (("--out", "absent/t.yaml"), "--out: cannot write absent/t.yaml: "),
        ],
    )
    def test_one_line_and_nothing_is_written(
        self, fl: Command, clocked: Any, here: Path, arguments: tuple[str, ...], says: str
    ) -> None:
        done = fl("tune", *QUICK, "--tokens", "8", *arguments)
        assert (done.status, done.out) == (2, "")
        assert says in done.err
        assert len(done.err.strip().splitlines()) == 1
        assert os.listdir(here) == []

    def test_an_op_with_unknown_sizes(
        self, fl: Command, clocked: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tune, "_subject", partial(subject, hidden=8))
        done = fl("tune", *QUICK, "--tokens", "8", "--out", "t.yaml")
        assert done.status == 1 and "(intermediate, shared_intermediate)" in done.out
        assert result(done).ops == {}

    def test_an_op_with_one_candidate(self, fl: Command, plugin: Plugin) -> None:
        plugin()
        only = ("--impl", "vendor.acme")
        done = fl("tune", *SIZES, *ONE_OP, *only, "--tokens", "8", "--out", "t.yaml")
        assert done.status == 1
        assert "silu_and_mul: skipped: vendor.acme is its only candidate" in done.out


HANGS = """
import time

def hangs(x):
    while len(x) == 16:
        try:
            time.sleep(0.01)
        except Exception:
            pass  # a kernel's own clean-up does not keep it running
    return silu_and_mul(x)

@hookimpl
def register_ops():
    return [act("acme"), act("fast", hangs)]
"""


def test_a_kernel_that_hangs_at_one_size(fl: Command, plugin: Plugin) -> None:
    plugin(HANGS)
    arguments = [a for a in QUICK if a not in ("--impl", "vendor.slow", "vendor.fast")]
    arguments += ["--impl", "vendor.fast", "--tokens", "8,16", "--timeout", "0.5"]
    done = fl("tune", *arguments, "--out", "t.yaml")
    figures = result(done).ops["silu_and_mul"].figures
    (rejected,) = [f for f in figures if f.rejected]
    assert (rejected.tokens, rejected.impl) == (16, "vendor.fast")
    assert "timed out after 0.5 s" in rejected.rejected


ENDS = """
import os, signal

def fast(x):
    if len(x) == 16:
        os.kill(os.getpid(), signal.SIGTERM)
    return silu_and_mul(x)

@hookimpl
def register_ops():
    return [act("acme"), act("fast", fast)]
"""


def test_a_terminated_run_writes_no_table(fl: Command, plugin: Plugin, here: Path) -> None:
    plugin(ENDS)
    one = (*SIZES, *ONE_OP, "--impl", "vendor.fast", "--tokens", "1,16")
    done = fl("tune", *one, "--out", "t.yaml")
    assert done.status == 130, done.err
    assert "interrupted after 1 of 2 measurements; no table was written" in done.err
    assert os.listdir(here) == []


def test_a_full_disk_keeps_the_former_table(
    fl: Command, clocked: Any, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "t.yaml").write_text("the former one")

    def full(self: object, data: bytes, *, lasting: bool) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Draft, "put", full)
    done = fl("tune", *QUICK, "--tokens", "1,8", "--out", "t.yaml")
    assert (done.status, done.out) == (1, "")
    assert "t.yaml: No space left on device" in done.err
    assert (here / "t.yaml").read_text() == "the former one"
    assert os.listdir(here) == ["t.yaml"]
