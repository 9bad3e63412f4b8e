"""Implementations compared with the oracle on a model's tensors: compared and skipped calls."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import BoundLayer, managing, planning, refusing, silu
from of_acme import silu_and_mul as right
from oracle_mutants import oracle_impl
from torch import nn

from vllm_fl.engine.plan import Plan
from vllm_fl.plugins import breadcrumb
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.types import OpImpl
from vllm_fl_verify import live as module
from vllm_fl_verify.live import Live

CPU = torch.device("cpu")
Kernel = Callable[[torch.Tensor], torch.Tensor]


class Model(nn.Module):
    """Consecutive layers, each with a wide input made from the previous output."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"act": BoundLayer(plan)}) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer["act"](torch.cat((x, x.flip(-1)), -1))
        return x


def plan_of(*impls: OpImpl, mode: Any = "eager", **policy: Any) -> Plan:
    return planning(managing(*impls, **policy), mode)


def acme(fn: Kernel, **fields: Any) -> OpImpl:
    # Not *args: the parameter must have the contract's name.
    return silu("vendor.acme", fn=fn, **fields)


def seen(
    plan: Plan, x: torch.Tensor | None = None, of: Callable[..., Any] = Model, **options: Any
) -> Live:
    model = of(plan)
    live = Live(plan, {"": model}, CPU, **options)
    with live.watching():
        model(torch.randn(100, 16, dtype=torch.bfloat16) if x is None else x)
    return live


def seen_in_two(plan: Plan, early: torch.Tensor, late: torch.Tensor) -> Live:
    """All layers have the same layouts; their names make two kinds of them."""
    model = nn.ModuleDict({"early": BoundLayer(plan), "late": BoundLayer(plan)})
    live = Live(plan, {"": model}, CPU)
    with live.watching():
        model["early"](early)
        model["late"](late)
    return live


def fault(live: Live) -> str:
    (objection,) = live.objections.values()
    return objection.reason


def test_a_right_implementation_is_compared_once_for_each_kind_of_layer() -> None:
    calls = []

    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return right(x)

    live = seen(plan_of(acme(silu_and_mul)))
    assert not live.objections and not live.left_out
    assert live.compared == 1, "three layers are of one kind"
    assert calls == [100, 100, 100], "no call is made twice"


def test_a_fault_names_the_layer_the_shape_and_the_worst_element() -> None:
    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        found = right(x)
        found[99, 3] += 5.0
        return found

    why = fault(seen(plan_of(acme(silu_and_mul))))
    assert "in layer layers.0.act, x (100, 32) bfloat16" in why
    assert "1 of 1024 elements exceed the tolerance" in why, "of 64 rows"
    assert why.count("; worst at (99, 3): got ") == 1


def test_a_fault_that_only_a_later_layer_brings_is_found() -> None:
    plan = plan_of(acme(lambda x: right(x) if x.abs().max() < 100 else right(x) * 1.5))
    x = torch.randn(8, 32)
    assert "in layer late" in fault(seen_in_two(plan, x, x * 1000))


def test_a_call_of_memory_that_nothing_wrote_is_skipped_and_its_kind_is_compared_later() -> None:
    plan = plan_of(acme(lambda x: right(x.abs()) if bool((x > 50).any()) else right(x)))
    model = nn.ModuleList([BoundLayer(plan), BoundLayer(plan)])
    live = Live(plan, {"": model}, CPU)
    x = torch.randn(8, 32)
    with live.watching():
        for unwritten in (float("nan"), float("inf"), 1e38, 2e21):
            model[0](x.index_fill(0, torch.tensor([3]), unwritten))
        assert not live.objections and (live.skipped, live.compared) == (4, 0)
        model[1](x * 100)
    assert "exceed" in fault(live) and live.compared == 1


def test_nan_of_finite_inputs_is_a_fault_of_the_kernel() -> None:
    assert "nan" in fault(seen(plan_of(acme(lambda x: right(x) * float("nan")))))


@pytest.mark.parametrize("row", [0, 1, 31, 32, 128, 255, 299])
def test_rows_on_both_sides_of_the_edges_of_tiles_are_compared(row: int) -> None:
    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        found = right(x)
        found[row] += 5.0
        return found

    x = torch.randn(300, 16, dtype=torch.bfloat16)
    why = fault(seen(plan_of(acme(silu_and_mul)), x))
    assert f"at ({row}, " in why


def test_what_runs_out_of_memory_that_may_be_used_up_is_left_out_and_no_fault() -> None:
    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    live = seen(plan_of(acme(silu_and_mul)), again=True)
    assert not live.objections and live.compared == 0
    assert live.left_out == {"silu_and_mul": "out of memory"}
    assert "CUDA out of memory" in fault(seen(plan_of(acme(silu_and_mul)))), "at start it is one"


def test_beside_what_serves_nothing_is_counted() -> None:
    order = ["vendor:emca", "vendor:acme"]
    first = refusing("vendor.emca", "too wide")
    plan = plan_of(first, acme(lambda x: right(x)), per_op_order={"silu_and_mul": order})
    model = Model(plan)
    model(torch.randn(4, 16, dtype=torch.bfloat16))
    record = plan.record
    before = dict(record.fallbacks), dict(record.refusals)
    assert all(before)
    with record.aside(), Live(plan, {"": model}, CPU).watching():
        assert record.is_aside
        model(torch.randn(4, 16, dtype=torch.bfloat16))
    assert (dict(record.fallbacks), dict(record.refusals)) == before and not record.is_aside


@pytest.mark.parametrize("stray", ["argument", "beside"])
def test_what_a_call_writes_over_live_memory_is_a_fault(stray: str) -> None:
    buffer = torch.randn(8, 40)

    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        found = right(x)
        if stray == "argument":
            x[0, 0] = 7.0
        else:
            x.as_strided((1,), (1,), 36).fill_(7.0)
        return found

    why = fault(seen(plan_of(acme(silu_and_mul)), buffer[:, :32], BoundLayer))
    assert ("overwrote 'x'" if stray == "argument" else "outside its arguments") in why


def test_what_raises_is_a_fault_and_the_forward_goes_on() -> None:
    """The other ranks wait for it in the next layer."""

    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        raise SystemExit(3)

    plan = plan_of(acme(silu_and_mul))
    model = Model(plan)
    live = Live(plan, {"": model}, CPU)
    with live.watching():
        assert model(torch.randn(4, 16)).shape == (4, 16)
    assert fault(live).startswith("it raised SystemExit")


@pytest.mark.parametrize("traceable", [False, True])
def test_what_a_compiler_will_get_is_compared_uncompiled(traceable: bool) -> None:
    plan = plan_of(acme(lambda x: right(x) * 2, traceable=traceable), mode="compiled")
    assert seen(plan).objections, "in its operator, or as it will be traced"
    good = plan_of(acme(lambda x: right(x), traceable=traceable), mode="compiled")
    assert seen(good).compared == 1


def test_nothing_is_left_on_the_path() -> None:
    plan = plan_of(acme(lambda x: right(x)))
    model = Model(plan)
    guards = {id(act.bound): act.bound for act in (layer["act"] for layer in model.layers)}
    before = [dict(guard.__globals__) for guard in guards.values()]
    live = Live(plan, {"": model}, CPU)
    with pytest.raises(ZeroDivisionError), live.watching():
        model(torch.randn(4, 16))
        assert guards[id(model.layers[0]["act"].bound)].__globals__["_fn"] is not before[0]["_fn"]
        raise ZeroDivisionError
    assert [dict(guard.__globals__) for guard in guards.values()] == before
    for part in model.modules():
        assert not part._forward_hooks and not part._forward_pre_hooks
    assert not plan.calls and not plan.fallbacks


@pytest.mark.parametrize("wrong", [False, True])
def test_no_tensor_of_the_forward_is_kept(wrong: bool) -> None:
    """vLLM sizes its KV cache by the memory that is free afterwards."""
    tensors: list[weakref.ref[torch.Tensor]] = []

    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        found = right(x) + wrong
        tensors.extend((weakref.ref(x), weakref.ref(found)))
        return found

    live = seen(plan_of(acme(silu_and_mul)))
    gc.collect()
    assert live.compared == 1 and bool(live.objections) is wrong
    assert tensors and not [ref for ref in tensors if ref() is not None]


@pytest.mark.parametrize(
    ("name", "most", "compared", "why"),
    [
        ("LARGEST", 10, 0, "its arguments are too large to copy"),
        ("CALLS", 1, 1, "the limit of compared calls was reached"),
    ],
)
def test_what_is_not_compared_is_reported(
    name: str, most: int, compared: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, most)
    early, late = torch.randn(2, 8, 32)
    live = seen_in_two(plan_of(acme(lambda x: right(x) + (x == late).all())), early, late)
    assert not live.objections and live.compared == compared
    assert live.left_out == {"silu_and_mul": why}


class Experts(nn.Module):
    """A layer with more weights than the copy limit."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.bound = plan.bind("fused_experts", self, frozenset())
        self.w13, self.w2 = torch.randn(64, 32, 24) * 0.2, torch.randn(64, 24, 16) * 0.2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = torch.rand(len(x), 4), torch.rand(len(x), 64).argsort(-1)[:, :4].int()
        routed = x, self.w13, self.w2, weights, ids
        return self.bound(*routed, "silu", False, -1, None, None, None)


def live_experts(change: Callable[[torch.Tensor, torch.Tensor], object]) -> Live:
    def changed(results: tuple[torch.Tensor], args: Any) -> tuple[torch.Tensor]:
        change(results[0], args[0])
        return results

    torch.manual_seed(0)
    plan = plan_of(oracle_impl(known_contracts().contracts["fused_experts"], changed))
    return seen(plan, torch.randn(40, 24), lambda plan: nn.Sequential(Experts(plan)))


def test_of_large_weights_those_are_compared_that_a_row_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LARGEST", 2**16)
    copied: list[int] = []
    on_host = module._on_host
    monkeypatch.setattr(
        module,
        "_on_host",
        lambda arg, rows: (copied.append(getattr(arg, "nbytes", 0)), on_host(arg, rows))[1],
    )
    live = live_experts(lambda out, x: None)
    assert live.compared == 1 and not live.objections and not live.left_out
    assert 0 < max(copied) < 64 * 32 * 24 * 4, "the weights of experts that some rows take"


def test_a_kernel_that_is_wrong_on_large_weights_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST", 2**16)
    why = fault(live_experts(lambda out, x: out[-1].zero_()))
    assert "at (39," in why
    why = fault(live_experts(lambda out, x: x.zero_()))
    assert "overwrote 'hidden_states'" in why


def planned_as_first(first: OpImpl, **policy: Any) -> Plan:
    order = {"silu_and_mul": [first.impl_id.partition(".")[0], "reference"]}
    return plan_of(first, silu("reference.torch", fn=right), per_op_order=order, **policy)


def test_supporting_no_call_differs_from_supporting_some() -> None:
    refuses = refusing("vendor.acme", "no such rows", fn=right)
    plan = planned_as_first(refuses)
    plan.fallbacks["attention_backend", "stock.vllm"] += 1  # chosen while the model was built
    live = seen(plan)
    assert not plan.record.refusals and not plan.calls, "counters begin when it has ended"
    assert plan.fallbacks == {("attention_backend", "stock.vllm"): 1}
    assert live.refused == {("silu_and_mul", "vendor.acme"): "no such rows"}
    assert live.served == {("silu_and_mul", "reference.torch")} and live.reached == {"silu_and_mul"}
    assert not live.objections

    def raising(x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("not these")

    live = seen(planned_as_first(acme(raising)))
    assert live.refused == {("silu_and_mul", "vendor.acme"): "NotImplementedError: not these"}
    some = acme(right, supports=lambda x: True if x.abs().max() > 5 else "small")
    x = torch.randn(8, 32)
    live = seen_in_two(planned_as_first(some), x.clamp(-1, 1), x * 100)
    assert not live.refused and len(live.served) == 2


@pytest.mark.parametrize("where", ["fn", "supports"])
def test_what_hangs_is_named_and_noted(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also in a call that is not compared, and in `supports`."""
    monkeypatch.setattr(breadcrumb, "SLOW", 0.3)
    noted: list[str] = []

    def said() -> list[str]:
        return [r.getMessage() for r in caplog.records if "is still running" in r.getMessage()]

    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        noted.append(breadcrumb.current_note())
        while where == "fn" and len(noted) == 2 and not said():
            time.sleep(0.01)
        return right(x)

    def asked(x: torch.Tensor) -> bool:
        while where == "supports" and not said():
            time.sleep(0.01)
        return True

    live = seen(plan_of(acme(silu_and_mul, supports=asked)))
    assert not live.objections and len(noted) == 3
    assert all("silu_and_mul=vendor.acme on live tensors in layer layers." in n for n in noted)
    (line,) = said()
    assert "silu_and_mul=vendor.acme" in line
