"""Orders by size in a plan: what runs at each size in both modes, and the plan's description."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import half, managing, norm, planning, refusing, silu

from vllm_fl.contracts import Tolerance
from vllm_fl.contracts.arguments import declared, tensor
from vllm_fl.dispatch.chain import Chain
from vllm_fl.dispatch.guard import call_guard
from vllm_fl.dispatch.record import Record
from vllm_fl.engine.digest import fingerprint
from vllm_fl.engine.opaque import opaque_op
from vllm_fl.engine.plan import Plan, PlanEntry
from vllm_fl.engine.start_line import line
from vllm_fl.errors import SettingsError
from vllm_fl.plugins.types import BackendImplKind, OpImpl

OP = "silu_and_mul"
NOTHING: frozenset[str] = frozenset()


def x(tokens: int) -> torch.Tensor:
    return torch.ones(tokens, 8)


def three(**fields: Any) -> tuple[OpImpl, ...]:
    return tuple(
        silu(impl_id, mark, **fields)
        for mark, impl_id in enumerate(("vendor.acme", "reference.torch", "default.flagos"), 1)
    )


def planned(order: Any, mode: Any = "eager", *impls: OpImpl, **fields: Any) -> Plan:
    notes = fields.pop("notes", {})
    demoted = fields.pop("demoted", {})
    manager = managing(*(impls or three()), per_op_order={OP: order}, **fields)
    return planning(manager, mode, notes=notes, demoted=demoted)


def entry(order: Any, mode: Any = "eager", *impls: OpImpl, **fields: Any) -> PlanEntry:
    return planned(order, mode, *impls, **fields).entries[OP]


def stock(mark: float = 9) -> OpImpl:
    """vLLM's implementation of the op."""

    def native(x: torch.Tensor) -> torch.Tensor:
        return half(x) + mark

    return OpImpl(OP, "stock.vllm", BackendImplKind.REFERENCE, native, traceable=True)


def marks(bound: Any, *tokens: int) -> list[int]:
    return [int(bound(x(n))[0, 0]) - 1 for n in tokens]


def test_one_number_for_all_tokens_tells_no_count() -> None:
    """The next tensor, with a row per token, determines the count."""

    def scaled(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x.double() * scale.double()

    rows = {"scale": tensor("tokens, 1", "float32").or_one(), "x": tensor("tokens, d")}
    more: Any = {"by_token": frozenset(rows), "tolerances": {"float32": Tolerance(0, 0, "exact")}}
    spec = declared(scaled, rows, (tensor("tokens, d", "x"),), samples=lambda *_: (), **more)
    few, many = (
        OpImpl("scaled", f"vendor.{name}", BackendImplKind.VENDOR, lambda scale, x, n=name: n, name)
        for name in ("few", "many")
    )
    record = Record(logging.getLogger())
    bound = call_guard(Chain("scaled", ((16, (few,)), (None, (many,))), spec, True, record))
    assert [bound(torch.ones(1), x(n)) for n in (16, 17)] == ["few", "many"]


# Planning.


def test_an_entry_says_what_runs_at_which_size() -> None:
    order = {"<=4": "vendor", "<=16": "stock", "rest": ["flagos", "reference"]}
    found = entry(order)
    assert found.label == "vendor.acme(<=4)|stock(<=16)|default.flagos"
    why = "; ".join(
        f"{impl_id}: not listed: stock"
        for impl_id in ("default.flagos", "reference.torch", "vendor.acme")
    )
    assert found.to_json() == {
        "impl": "default.flagos",
        "reason": "your order lists flagos",
        "rows": [
            {"up_to": 4, "impl": "vendor.acme", "reason": "your order lists vendor"},
            {"up_to": 16, "impl": "stock", "reason": f"your order lists stock ({why})"},
        ],
    }
    assert [i.impl_id for i in found.impls] == ["default.flagos", "reference.torch", "vendor.acme"]
    assert [i.impl_id for i in found.firsts] == ["default.flagos", "vendor.acme"]


@pytest.mark.parametrize(
    ("order", "label"),
    [
        ({"<=4": "vendor", "<=8": "vendor", "rest": "flagos"}, "vendor.acme(<=8)|default.flagos"),
        ({"<=4": "vendor", "<=8": "flagos", "rest": "flagos"}, "vendor.acme(<=4)|default.flagos"),
        ({"<=4": "flagos", "rest": ["flagos"]}, "default.flagos"),
        ({"<=4": ["flagos", "vendor"], "rest": "flagos"}, "default.flagos(<=4)|default.flagos"),
        ({"<=4": ["vendor:none", "flagos"], "rest": "flagos"}, "default.flagos"),
        (
            {"<=4": "flagos", "<=8": "vendor", "rest": "flagos"},
            "default.flagos(<=4)|vendor.acme(<=8)|default.flagos",
        ),
    ],
)
def test_rows_that_run_the_same_are_one(order: Any, label: str) -> None:
    assert entry(order).label == label


def test_what_was_demoted_is_off_in_every_row() -> None:
    order = {"<=4": ["vendor", "reference"], "<=8": "vendor", "rest": ["flagos", "vendor"]}
    found = entry(order, demoted={(OP, "vendor.acme"): "wrong"})
    assert found.label == "reference.torch(<=4)|stock(<=8)|default.flagos"
    assert "vendor.acme" not in {i.impl_id for i in found.impls}


def test_strict_and_a_row_in_which_nothing_may_run() -> None:
    order = {"<=4": "vendor:none", "rest": "flagos"}
    assert "(vendor:none) can run" in entry(order, strict=True).unmet
    assert entry(order).unmet == ""
    # Such a row is not treated as `stock`.
    also = {"<=4": "vendor:none", "rest": "stock"}
    assert "(vendor:none) can run" in entry(also, strict=True).unmet


def test_an_op_without_tokens_has_no_rows() -> None:
    order = {"attention_backend": {"<=4": "stock", "rest": "vendor"}}
    with pytest.raises(SettingsError, match="attention_backend has none") as caught:
        planning(managing(*three(), per_op_order=order))
    assert caught.value.key == "op_backends.attention_backend"


# Eager.


def test_each_call_runs_its_row_and_is_counted_as_that() -> None:
    plan = planned({"<=4": "vendor", "<=16": "reference", "rest": "flagos"})
    plan.record.counts = "calls"
    for bound in (plan.bind(OP, object(), NOTHING), plan.without_layer(OP)):
        assert marks(bound, 1, 4, 5, 16, 17) == [1, 1, 2, 2, 3]
    assert plan.calls == {
        (OP, "vendor.acme"): 4,
        (OP, "reference.torch"): 4,
        (OP, "default.flagos"): 2,
    }


def test_a_refusal_falls_down_its_row_and_then_to_vllms_own() -> None:
    impls = refusing("vendor.acme", "no"), *three()[1:]
    order = {"<=4": ["vendor", "reference"], "<=8": "vendor", "rest": "flagos"}
    plan = planned(order, "eager", *impls)
    bound = plan.bind(OP, object(), NOTHING, last=stock())
    assert marks(bound, 4, 8, 9) == [2, 9, 3]
    assert plan.fallbacks == {(OP, "reference.torch"): 1, (OP, "stock.vllm"): 1}


@pytest.mark.parametrize("row", ["stock", ["stock", "vendor"]])
def test_a_stock_row_is_vllms_own_and_nothing_stands_before_it(row: Any) -> None:
    for order, expected in (
        ({"<=4": row, "rest": "flagos"}, [9, 3]),
        ({"<=4": "flagos", "rest": row}, [3, 9]),
    ):
        plan = planned(order)
        assert marks(plan.bind(OP, object(), NOTHING, last=stock()), 4, 5) == expected
        assert marks(plan.without_layer(OP, last=stock()), 4, 5) == expected
        assert not plan.fallbacks


def test_a_layers_own_method_stands_for_stock_as_it_is() -> None:
    """Without vllm-fl, its exceptions would not be caught; so they are not caught here."""

    def own(self: Any, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 3:
            raise ValueError("vLLM's own")
        return half(x) + self.mark

    candidate = OpImpl(OP, "stock.vllm", BackendImplKind.REFERENCE, own)
    plan = planned({"<=4": "stock", "rest": ["vendor", "flagos"]})
    layers = [SimpleNamespace(mark=mark) for mark in (20, 30)]
    bounds = [plan.bind(OP, layer, NOTHING, last=stock(), original=candidate) for layer in layers]
    assert [marks(bound, 4, 5) for bound in bounds] == [[20, 1], [30, 1]]
    with pytest.raises(ValueError, match="vLLM's own"):
        bounds[0](x(3))
    assert not plan.fallbacks and not plan.record.demotions
    # Without rows it is not used.
    plan = planned(["vendor", "flagos"], "eager", refusing("vendor.acme", "no"))
    assert marks(plan.bind(OP, layers[0], NOTHING, last=stock(), original=candidate), 4) == [9]


@pytest.mark.parametrize(
    ("row", "mark", "impl_id"),
    [(["stock", "vendor"], 1, "vendor.acme"), ("stock", 3, "default.flagos")],
)
def test_a_place_without_a_form_of_vllms_runs_the_next_and_says_so_once(
    caplog: pytest.LogCaptureFixture, row: Any, mark: int, impl_id: str
) -> None:
    caplog.set_level("WARNING", logger="vllm_fl")
    plan = planned({"<=4": row, "rest": "flagos"})
    for bound in (plan.bind(OP, object(), NOTHING), plan.without_layer(OP)):
        assert marks(bound, 4, 5) == [mark, 3]
    (record,) = caplog.records
    assert f"'{impl_id}' runs there" in record.getMessage()


def left_at(plan: Plan, *tokens: int) -> list[bool]:
    """`stock_at` of each token count; it must match calls without a layer."""
    is_left = plan.stock_at(OP)
    assert is_left is not None
    is_left_at = [is_left(n) for n in tokens]
    assert is_left_at == [
        mark == 9 for mark in marks(plan.without_layer(OP, last=stock()), *tokens)
    ]
    return is_left_at


def test_a_plan_tells_which_sizes_are_left_to_vllm() -> None:
    plan = planned({"<=4": "vendor", "<=16": "stock", "<=32": "flagos", "rest": "stock"})
    assert left_at(plan, 1, 4, 5, 16, 17, 32, 33) == [False, False, True, True, False, False, True]
    plan = planned({"<=4": ["stock", "vendor"], "rest": "flagos"})
    assert left_at(plan, 1, 4, 5) == [True, True, False]


@pytest.mark.parametrize("row", ["stock", ["stock", "vendor"]])
def test_stock_at_every_size_is_stock_and_at_some_it_is_not(row: Any) -> None:
    plan = planned({"<=4": row, "rest": "stock"})
    assert plan.is_stock(OP) and plan.stock_at(OP) is None
    assert planned({"<=4": "vendor", "rest": "flagos"}).stock_at(OP) is None
    assert not planned({"<=4": row, "rest": "vendor"}).is_stock(OP)
    plan = planned({"<=4": "vendor", "rest": row})
    assert not plan.is_stock(OP) and f" {OP}=vendor.acme(<=4)|stock (" in line(plan)


# Compiled.


def lowered(plan: Plan, **fields: Any) -> Any:
    torch._dynamo.reset()
    bound = plan.bind(OP, object(), NOTHING, **fields)
    call = torch.compile(lambda x: bound(x) * 1, fullgraph=True, dynamic=True, backend="aot_eager")

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch._dynamo.config.patch(error_on_recompile=True):
            return call(x)

    call(x(3))
    return run


@pytest.mark.parametrize("traceable", [True, False])
def test_one_graph_serves_every_row(traceable: bool) -> None:
    order = {"<=4": "vendor", "<=16": "stock", "rest": "flagos"}
    plan = planned(order, "compiled", *three(traceable=traceable))
    plan.record.counts = "tracings"
    run = lowered(plan, last=stock())
    assert marks(run, 2, 4, 5, 16, 17, 300) == [1, 1, 9, 9, 3, 3]


def test_a_refusal_in_compiled_code_falls_down_its_row() -> None:
    impls = refusing("vendor.acme", "no"), *three()[1:]
    order = {"<=4": ["vendor", "reference"], "rest": "flagos"}
    plan = planned(order, "compiled", *impls)
    run = lowered(plan)
    plan.fallbacks.clear()
    assert marks(run, 4, 5) == [2, 3]
    assert plan.fallbacks == {(OP, "reference.torch"): 1}


def test_the_operators_name_and_the_digest_are_those_of_the_rows() -> None:
    orders: list[Any] = [
        ["flagos"],
        {"<=4": "vendor", "rest": "flagos"},
        {"<=5": "vendor", "rest": "flagos"},
        {"<=4": "reference", "rest": "flagos"},
        {"<=4": ["vendor", "reference"], "rest": "flagos"},
    ]
    plans = [planned(order, "compiled") for order in orders]
    operators = {str(opaque_op(plan.chain(OP)).fn.__globals__["_op0"]) for plan in plans}
    assert len(operators) == len(plans)
    facts = [str(fingerprint(plan, {})) for plan in plans]
    assert len(set(facts)) == len(plans)
    assert str(fingerprint(planned(orders[1], "compiled"), {})) == facts[1]


def test_an_operator_overwrites_what_the_largest_calls_overwrite() -> None:
    """Results of other rows are copied to where the operator writes them."""

    def writing(x: Any, residual: Any) -> Any:
        results = x + 5, residual + x
        return x.copy_(results[0]), residual.copy_(results[1])

    writes = norm("vendor.w", writing, consumes={"x", "residual"})
    fresh = norm("vendor.f", lambda x, residual: (x + 5, residual + x))
    for rest, row in ((writes, fresh), (fresh, writes)):
        order = {"<=4": f"impl:{row.impl_id}", "rest": f"impl:{rest.impl_id}"}
        plan = planning(managing(writes, fresh, per_op_order={"rms_norm": order}), "compiled")
        op = opaque_op(plan.chain("rms_norm", frozenset({"x", "residual"})))
        assert bool(op.consumes) == bool(rest.consumes)
        for tokens in (2, 9):
            given, residual = x(tokens), x(tokens)
            normed, added = op.fn(given, residual, torch.ones(8), 1e-6, None)
            assert normed.eq(6).all() and added.eq(2).all()
            assert given.eq(1).all() != bool(op.consumes)
