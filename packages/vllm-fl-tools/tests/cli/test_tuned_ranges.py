"""Rows of `vllm-fl tune` for ops that a compiler includes in its graphs, by device and op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import silu

from vllm_fl.contracts import ModelSizes
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.settings.policy import Mode
from vllm_fl_tools.cli._tuning import GraphPosition, TuningSubject, rows_by_op
from vllm_fl_tools.engine.timing import Measured
from vllm_fl_tools.engine.tuning import Contender

OP = "silu_and_mul"
TOKENS = (1, 8, 64, 512)


def graphs(device: str, mode: Mode, op: str, default: str = "vendor.slow") -> GraphPosition:
    """An op with a traceable `vendor.fast` and a default."""
    where, absent = torch.device(device), frozenset[str]()
    subject = TuningSubject("model", ModelSizes(), TOKENS, mode, torch.bfloat16, where, absent)
    fast = Contender("vendor.fast", (silu("vendor.fast", traceable=True),))
    slow = Contender(default, (silu("vendor.slow"),))
    return GraphPosition(subject, known_contracts().bindings[op], op, [fast, slow])


def rows(*ops: GraphPosition) -> list[list[tuple[int, str]]]:
    """Rows of ops, with `vendor.fast` faster than the default up to 8 tokens."""
    found = []
    for op in ops:
        default, measured = op.contenders[1].name, []
        for tokens in TOKENS:
            times = {default: [10.0] * 4, "vendor.fast": [5.0 if tokens <= 8 else 20.0] * 4}
            measured.append(Measured(tokens, default, times=times))
        found.append((op, measured))
    return [[(row.up_to, row.impl) for row in of_op] for of_op in rows_by_op(found)]


BY_RANGE = [(8, "vendor.fast"), (512, "default")]
FOR_ALL = [(512, "default")]


@pytest.mark.parametrize(
    ("device", "mode", "op", "expected"),
    [
        ("cuda", "compiled", "linear", BY_RANGE),
        ("cpu", "compiled", "linear", FOR_ALL),
        ("cuda", "compiled", OP, FOR_ALL),
        ("cuda", "compiled", "rms_norm", FOR_ALL),
        ("cuda", "eager", OP, BY_RANGE),
    ],
)
def test_only_products_have_rows_by_range_among_traced_winners(
    device: str, mode: Mode, op: str, expected: Any
) -> None:
    assert rows(graphs(device, mode, op, default="stock")) == [expected]


@pytest.mark.parametrize("op", ["moe_sum", "qk_norm_rope"])
def test_what_is_called_when_a_graph_runs_may_differ_by_size_among_implementations(op: str) -> None:
    assert rows(graphs("cuda", "compiled", op)) == [BY_RANGE]


@pytest.mark.parametrize("op", ["moe_sum", "reshape_and_cache"])
def test_and_may_be_left_to_vllm_at_some_sizes_where_each_call_tells_its_own(op: str) -> None:
    found = graphs("cuda", "compiled", op, default="stock")
    assert found.bound_to_all == frozenset()
    assert rows(found) == [BY_RANGE]


@pytest.mark.parametrize(
    ("op", "is_traced"),
    [("reshape_and_cache", False), ("chunk_gated_delta_rule", False), ("silu_and_mul", True)],
)
def test_what_piecewise_graphs_leave_out_is_no_part_of_a_graph(op: str, is_traced: bool) -> None:
    """Linear attention calls a vLLM layer inside the operator that splits the graphs."""
    found = graphs("cuda", "compiled", op)
    assert found.binding.between_graphs is not is_traced
    assert found.traced == ({"vendor.fast", "vendor.slow"} if is_traced else set())


@pytest.mark.parametrize(
    ("op", "why"),
    [
        ("causal_conv1d", "its function has features before tokens"),
        ("fused_experts", "an operator of it wants packed weights"),
        ("qk_norm_rope", "vLLM's own form is in the graph"),
    ],
)
def test_and_elsewhere_at_every_size_or_none(op: str, why: str) -> None:
    found = graphs("cuda", "compiled", op, default="stock")
    assert found.bound_to_all == {"stock"}, why
    assert rows(found) == [FOR_ALL]
    assert rows(graphs("cuda", "eager", op, default="stock")) == [BY_RANGE]


def test_all_ops_have_the_same_ranges() -> None:
    ops = [graphs("cuda", "compiled", op, default="stock") for op in ("linear", "linear_fp8")]
    assert rows(*ops) == [BY_RANGE, BY_RANGE]


def measured(graph: GraphPosition, *sizes: int, fast_up_to: int) -> list[Measured]:
    """An op at some sizes, with `vendor.fast` the fastest up to `fast_up_to` tokens."""
    default = graph.contenders[1].name
    found = []
    for tokens in sizes:
        took = {default: [10.0] * 4, "vendor.fast": [5.0 if tokens <= fast_up_to else 20.0] * 4}
        found.append(Measured(tokens, default, times=took))
    return found


@pytest.mark.parametrize("fast_up_to", [8, 0])
def test_a_part_of_an_op_that_wins_is_left_to_vllm(fast_up_to: int) -> None:
    """Planning its part hides the winning op from graphs; the op would save a product's time."""
    whole = graphs("cuda", "compiled", "linear_silu_and_mul", default="stock")
    part = graphs("cuda", "compiled", OP)
    found = [
        (part, measured(part, *TOKENS, fast_up_to=512)),
        (whole, measured(whole, *TOKENS, fast_up_to=fast_up_to)),
    ]
    of_part_now, of_whole = ([(r.up_to, r.impl) for r in rows] for rows in rows_by_op(found))
    assert of_part_now == (FOR_ALL if fast_up_to else [(512, "vendor.fast")])
    assert of_whole == (BY_RANGE if fast_up_to else FOR_ALL)
