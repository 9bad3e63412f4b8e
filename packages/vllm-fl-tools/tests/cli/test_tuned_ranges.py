"""What rows `vllm-fl tune` gives to what a compiler takes into its graphs, by device and op."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import silu

from vllm_fl.contracts import ModelSizes, contracts
from vllm_fl.contracts.binding import Binding, SizeRule
from vllm_fl.integration.seams import fusions
from vllm_fl.plugins.loading import known_contracts
from vllm_fl_tools.cli import _tuning, tune
from vllm_fl_tools.engine.timing import Measured
from vllm_fl_tools.engine.tuning import Contender

OP = "silu_and_mul"
TOKENS = (1, 8, 64, 512)


def contender(name: str, **fields: Any) -> Contender:
    return Contender(name, (silu(name, **fields),))


def work(
    device: str,
    mode: str,
    *tuned: str,
    default: str = "vendor.slow",
    absent: tuple[str, ...] = ("fused_experts",),
    **fields: Any,
) -> Any:
    """A finished `Work` on ops of which a traceable `vendor.fast` is faster at 8 tokens alone."""
    done: Any = object.__new__(_tuning.Work)
    done.subject = SimpleNamespace(
        mode=mode,
        device=torch.device(device),
        tokens=TOKENS,
        told={},
        name="model",
        absent=frozenset(absent),
    )
    slow = Contender(default, (silu("vendor.slow"),))
    contenders = [contender("vendor.fast", traceable=True, **fields), slow]
    done._bindings = known_contracts().bindings
    done._tunings = {
        op: SimpleNamespace(contenders=contenders, spec=contracts()[op], default=default)
        for op in tuned
    }
    done._found, done._hung, done._seconds = {}, {}, 0.0
    lines = []
    for op in tuned:
        for tokens in TOKENS:
            times = {default: [10.0] * 4, "vendor.fast": [5.0 if tokens == 8 else 20.0] * 4}
            found = Measured(tokens, default, finals=times, again=times)
            lines.append({"op": op, "measured": asdict(found), "seconds": 1.0})
    done.take_over(lines)
    return done


@pytest.fixture(autouse=True)
def heading(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"identity": {}, "arguments": {"dtype": "bfloat16"}}
    monkeypatch.setattr(_tuning.Work, "heading", told)


def rows(done: Any, op: str) -> list[tuple[int, str]]:
    return [(row.up_to, row.impl) for row in done.table().ops[op].rows]


BY_RANGE = [(1, "default"), (8, "vendor.fast"), (512, "default")]
FOR_ALL = [(512, "default")]


@pytest.mark.parametrize(
    ("device", "mode", "expected"),
    [("cuda", "compiled", BY_RANGE), ("cpu", "compiled", FOR_ALL), ("cuda", "eager", BY_RANGE)],
)
def test_traced_winners_have_rows_where_vllm_compiles_by_range(
    device: str, mode: str, expected: Any
) -> None:
    assert rows(work(device, mode, OP), OP) == expected


@pytest.mark.parametrize(
    ("op", "consumes", "expected"),
    [
        ("rotary_embedding", (), BY_RANGE),
        ("rotary_embedding", ("query", "key"), FOR_ALL),  # in place: not inlined by range
        ("rms_norm", ("x", "residual"), BY_RANGE),  # but in vLLM's IR it is
    ],
)
def test_an_operator_that_is_not_inlined_by_range_has_one_row(
    op: str, consumes: tuple[str, ...], expected: Any
) -> None:
    done = work("cuda", "compiled", op)
    done._tunings[op].contenders.append(contender("vendor.other", consumes=frozenset(consumes)))
    assert rows(done, op) == expected


@pytest.mark.parametrize("op", ["moe_sum", "qk_norm_rope"])
def test_what_is_called_when_a_graph_runs_may_differ_by_size_among_implementations(op: str) -> None:
    assert rows(work("cuda", "compiled", op), op) == BY_RANGE


@pytest.mark.parametrize("op", ["moe_sum", "reshape_and_cache"])
def test_and_may_be_left_to_vllm_at_some_sizes_where_each_call_tells_its_own(op: str) -> None:
    done = work("cuda", "compiled", op, default="stock")
    assert done._bound_to_all(op, done._tunings[op]) == frozenset()
    assert rows(done, op) == BY_RANGE


@pytest.mark.parametrize(
    ("op", "is_traced"),
    [("reshape_and_cache", False), ("chunk_gated_delta_rule", False), ("silu_and_mul", True)],
)
def test_what_piecewise_graphs_leave_out_is_no_part_of_a_graph(op: str, is_traced: bool) -> None:
    """Linear attention calls a layer of vLLM's inside the operator at which graphs are split."""
    done = work("cuda", "compiled", op)
    assert done._is_between_graphs(op) is not is_traced
    names = {contender.name for contender in done._tunings[op].contenders}
    assert done._traced(op, done._tunings[op].contenders) == (names if is_traced else set())


@pytest.mark.parametrize(
    ("op", "why"),
    [
        ("causal_conv1d", "its function has features before tokens"),
        ("fused_experts", "an operator of it wants packed weights"),
        ("qk_norm_rope", "vLLM's own form is in the graph"),
    ],
)
def test_and_elsewhere_at_every_size_or_none(op: str, why: str) -> None:
    done = work("cuda", "compiled", op, default="stock", absent=())
    assert done._bound_to_all(op, done._tunings[op]) == {"stock"}, why
    assert rows(done, op) == FOR_ALL
    assert rows(work("cuda", "eager", op, default="stock"), op) == BY_RANGE


def test_where_a_pass_of_vllms_finds_an_op_it_may_be_left_to_vllm_by_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = work("cuda", "compiled", "qk_norm_rope", default="stock")
    monkeypatch.setattr(fusions, "_is_there", lambda place: True)
    assert rows(done, "qk_norm_rope") == BY_RANGE


def test_an_activation_that_vllms_experts_call_is_left_to_vllm_at_every_size_or_none() -> None:
    assert rows(work("cuda", "compiled", OP, default="stock"), OP) == BY_RANGE
    assert rows(work("cuda", "compiled", OP, default="stock", absent=()), OP) == FOR_ALL
    assert rows(work("cuda", "compiled", "rms_norm", absent=()), "rms_norm") == BY_RANGE


@pytest.mark.parametrize(("more", "absent"), [({}, {"fused_experts"}), ({"experts": 8}, set())])
def test_a_model_of_which_no_number_of_experts_is_told_has_none(
    more: Any, absent: set[str]
) -> None:
    told = argparse.Namespace(
        model=None, sizes="intermediate=8", mode="compiled", dtype=None, device="cpu"
    )
    sizes = ModelSizes(intermediate=8, more=more)
    cpu = torch.device("cpu")
    assert tune._subject(told, sizes, (1,), known_contracts().bindings, cpu).absent == absent
    acme = Binding(sizes=(SizeRule("experts", lambda config: 8, 8),), calls_operators=True)
    mine = tune._subject(told, sizes, (1,), {"acme_experts": acme}, cpu)
    assert bool(mine.absent) is bool(absent), "anybody's op is asked, and by its own sizes"


def test_all_ops_have_the_same_ranges() -> None:
    done = work("cuda", "compiled", OP, "gelu_and_mul")
    assert rows(done, OP) == rows(done, "gelu_and_mul") == BY_RANGE
