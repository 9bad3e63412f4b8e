"""Implementations beside the oracle on a model's own tensors: what is seen, and what is left."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import managing, planning, refusing, silu
from torch import nn
from torch.nn import functional as F

from vllm_fl.contracts import ModelSizes, Sample, contracts
from vllm_fl.engine import live as module
from vllm_fl.engine.live import Live
from vllm_fl.engine.plan import Plan
from vllm_fl.plugins import breadcrumb
from vllm_fl.plugins.types import BackendImplKind, OpImpl

CPU = torch.device("cpu")
Kernel = Callable[[torch.Tensor], torch.Tensor]


def right(x: torch.Tensor) -> torch.Tensor:
    d = x.shape[-1] // 2
    return F.silu(x[..., :d]) * x[..., d:]


class Act(nn.Module):
    """A layer as vLLM's: it binds when it is built."""

    def __init__(self, plan: Plan, op: str = "silu_and_mul") -> None:
        super().__init__()
        self.bound = plan.bind(op, self, frozenset())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bound(x)


class Model(nn.Module):
    """Layers one behind the other, each with a wide input made of the one before."""

    def __init__(self, plan: Plan, layers: int = 3, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.layers = nn.ModuleList(nn.ModuleDict({"act": Act(plan)}) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer["act"](torch.cat((x, x.flip(-1)), -1) * self.scale)
        return x


def plan_of(*impls: OpImpl, mode: Any = "eager", **policy: Any) -> Plan:
    return planning(managing(*impls, **policy), mode)


def acme(fn: Kernel, **fields: Any) -> OpImpl:
    # Written out: a kernel's parameter has the contract's name.
    return silu("vendor.acme", fn=fn, **fields)


def seen(plan: Plan, x: torch.Tensor | None = None, **fields: Any) -> Live:
    model = Model(plan, **fields)
    live = Live(plan, {"": model}, CPU)
    with live.watching():
        model(torch.randn(100, 16, dtype=torch.bfloat16) if x is None else x)
    return live


def test_a_right_implementation_is_compared_once_for_each_kind_of_layer() -> None:
    calls = []

    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return right(x)

    live = seen(plan_of(acme(silu_and_mul)))
    assert not live.faults and not live.left_out
    assert live.compared == 1, "three layers are of one kind"
    assert calls == [100, 100, 100], "no call is made twice"


def test_a_fault_names_the_layer_the_shape_and_the_worst_element() -> None:
    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        found = right(x)
        found[99, 3] += 5.0
        return found

    (why,) = seen(plan_of(acme(silu_and_mul))).faults.values()
    assert "in layer layers.0.act, x (100, 32) bfloat16" in why
    assert "1 of 1024 elements are off" in why, "of 64 rows"
    assert why.count("at (99, 3)") == 1 and "instead of" in why


def test_a_fault_that_only_a_later_layer_brings_is_found() -> None:
    """The layouts of all layers are alike: they are of two kinds by their names."""

    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        return right(x) if x.abs().max() < 100 else right(x) * 1.5

    plan = plan_of(acme(silu_and_mul))
    model = nn.ModuleDict({"early": Act(plan), "late": Act(plan)})
    live = Live(plan, {"": model}, CPU)
    x = torch.randn(8, 32)
    with live.watching():
        model["early"](x)
        model["late"](x * 1000)
    (why,) = live.faults.values()
    assert "in layer late" in why


def test_large_right_values_are_no_fault() -> None:
    for scale in (1e-3, 30.0):
        live = seen(plan_of(acme(lambda x: right(x))), scale=scale)
        assert not live.faults and live.compared == 1


def test_a_row_that_is_left_over_from_a_batch_of_one_row_more_is_found() -> None:
    before: list[torch.Tensor] = []

    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        found = right(x)
        if before and len(before[-1]) == len(found) + 1:
            found[-1] = before[-1][len(found) - 1]
        before.append(found)
        return found

    plan = plan_of(acme(silu_and_mul))
    model = Model(plan)
    live = Live(plan, {"": model}, CPU)
    with live.watching():
        for tokens in (17, 16):  # as integration's probe has them
            model(torch.randn(tokens, 16, dtype=torch.bfloat16))
    (why,) = live.faults.values()
    assert "at (15, " in why


@pytest.mark.parametrize("row", [0, 1, 2, 31, 32, 63, 127, 128, 255, 256, 299])
def test_rows_on_both_sides_of_the_edges_of_tiles_are_compared(row: int) -> None:
    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        found = right(x)
        found[row] += 5.0
        return found

    x = torch.randn(300, 16, dtype=torch.bfloat16)
    (why,) = seen(plan_of(acme(silu_and_mul)), x).faults.values()
    assert f"at ({row}, " in why


def test_what_runs_out_of_memory_that_may_be_used_up_is_left_out_and_no_fault() -> None:
    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def looked(**limits: Any) -> Live:
        plan = plan_of(acme(silu_and_mul))
        model = Model(plan)
        live = Live(plan, {"": model}, CPU, **limits)
        with live.watching():
            model(torch.randn(100, 16, dtype=torch.bfloat16))
        return live

    live = looked(scarce=True)
    assert not live.faults and live.compared == 0
    assert live.left_out == {"silu_and_mul": "no memory was left for it"}
    assert "CUDA out of memory" in str([*looked().faults.values()]), "at start it is one"


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

    plan = plan_of(acme(silu_and_mul))
    model = Act(plan)
    live = Live(plan, {"": model}, CPU)
    with live.watching():
        model(buffer[:, :32])
    (why,) = live.faults.values()
    assert ("overwrote 'x'" if stray == "argument" else "beside its arguments") in why


def test_what_raises_is_a_fault_and_the_forward_goes_on() -> None:
    """The other ranks wait for it in the next layer."""

    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        raise SystemExit(3)

    plan = plan_of(acme(silu_and_mul))
    model = Model(plan)
    live = Live(plan, {"": model}, CPU)
    with live.watching():
        assert model(torch.randn(4, 16)).shape == (4, 16)
    (why,) = live.faults.values()
    assert why.startswith("it raised SystemExit")


def test_the_later_choice_that_takes_a_refused_call_is_compared() -> None:
    later = acme(lambda x: right(x) + 1)
    live = seen(plan_of(refusing("default.flagos", "not today"), later))
    assert [*live.faults] == [("silu_and_mul", "vendor.acme")]


@pytest.mark.parametrize("traceable", [False, True])
def test_what_a_compiler_will_get_is_compared_uncompiled(traceable: bool) -> None:
    plan = plan_of(acme(lambda x: right(x) * 2, traceable=traceable), mode="compiled")
    assert seen(plan).faults, "in its operator, or as it will be traced"
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
    """vLLM sizes its KV cache by what is free afterwards."""
    tensors: list[weakref.ref[torch.Tensor]] = []

    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        found = right(x) + wrong
        tensors.extend((weakref.ref(x), weakref.ref(found)))
        return found

    live = seen(plan_of(acme(silu_and_mul)))
    gc.collect()
    assert live.compared == 1 and bool(live.faults) is wrong
    assert tensors and not [ref for ref in tensors if ref() is not None]


def test_a_draft_models_layer_is_told_from_the_models() -> None:
    plan = plan_of(acme(lambda x: right(x) if len(x) != 6 else right(x) + 1.0))
    model, draft = Model(plan), Model(plan, layers=1)
    live = Live(plan, {"": model, "(draft model) ": draft}, CPU)
    with live.watching():
        model(torch.randn(8, 16))
        draft(torch.randn(6, 16))
    (why,) = live.faults.values()
    assert "in layer (draft model) layers.0.act, x (6, 32)" in why


def test_what_is_not_compared_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST", 10)
    live = seen(plan_of(acme(lambda x: right(x) * 2)))
    assert not live.faults and live.compared == 0
    assert live.left_out == {"silu_and_mul": "its arguments are too large to be copied"}


class Experts(nn.Module):
    """A layer whose weights are larger than what is copied."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.bound = plan.bind("fused_experts", self, frozenset())
        self.w13, self.w2 = torch.randn(64, 32, 24) * 0.2, torch.randn(64, 24, 16) * 0.2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = torch.rand(len(x), 4), torch.rand(len(x), 64).argsort(-1)[:, :4].int()
        routed = x, self.w13, self.w2, weights, ids
        return self.bound(*routed, "silu", False, -1, None, None, None)


def of_experts(change: Callable[..., None]) -> OpImpl:
    def fused_experts(
        hidden_states: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: str = "silu",
        apply_router_weight_on_input: bool = False,
        global_num_experts: int = -1,
        expert_map: torch.Tensor | None = None,
        w13_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        oracle = contracts()["fused_experts"].oracle
        out = oracle(hidden_states, w13, w2, topk_weights, topk_ids).to(hidden_states.dtype)
        change(out, hidden_states)
        return out

    kind = BackendImplKind.VENDOR
    return OpImpl("fused_experts", "vendor.acme", kind, fused_experts, "acme")


def live_experts(change: Callable[..., None]) -> Live:
    torch.manual_seed(0)
    plan = plan_of(of_experts(change))
    model = nn.Sequential(Experts(plan))
    live = Live(plan, {"": model}, CPU)
    with live.watching():
        model(torch.randn(40, 24))
    return live


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
    assert live.compared == 1 and not live.faults and not live.left_out
    assert 0 < max(copied) < 64 * 32 * 24 * 4, "the weights of experts that some rows take"


def test_a_kernel_that_is_wrong_on_large_weights_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST", 2**16)
    (why,) = live_experts(lambda out, x: out[-1].zero_()).faults.values()
    assert "at (39," in why
    (why,) = live_experts(lambda out, x: x.zero_()).faults.values()
    assert "overwrote 'hidden_states'" in why


def test_rows_that_read_too_much_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST", 2**16)
    monkeypatch.setattr(module, "PART", 2**10)
    live = live_experts(lambda out, x: None)
    assert not live.faults and live.compared == 0
    assert live.left_out == {"fused_experts": "what a row of it reads is too large to be copied"}


def test_norms_are_held_to_their_tolerance_beside_one_large_feature() -> None:
    """A scale taken from the largest value would hide the others."""
    from vllm_fl.contracts import contracts

    powers = {"rms_norm": 0, "rotary_embedding": 1, "gelu_and_mul_sparse": 2, "silu_and_mul": 1}
    powers["linear_fp8"] = 1  # by what its scales make of its numbers
    assert {op: module._growth(contracts()[op]) for op in powers} == powers


def test_a_size_of_a_contracts_own_hides_no_large_values() -> None:
    norm = contracts()["rms_norm"]

    def served(sizes: ModelSizes, *args: Any) -> Iterator[Sample]:
        return iter(norm.served(replace(sizes, hidden=int(sizes.more["capped"] or 0)), *args))

    assert module._growth(replace(norm, served=served)) == 0


def planned_as_first(first: OpImpl, **policy: Any) -> Plan:
    order = {"silu_and_mul": [first.impl_id.partition(".")[0], "reference"]}
    return plan_of(first, silu("reference.torch", fn=right), per_op_order=order, **policy)


def test_who_takes_none_of_its_calls_is_told_from_who_takes_some() -> None:
    refuses = refusing("vendor.acme", "no such rows", fn=right)
    live = seen(planned_as_first(refuses))
    assert live.refused == {("silu_and_mul", "vendor.acme"): "no such rows"}
    assert live.served == {("silu_and_mul", "reference.torch")} and live.reached == {"silu_and_mul"}
    assert not live.faults

    def raising(x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("not these")

    live = seen(planned_as_first(acme(raising)))
    assert live.refused == {("silu_and_mul", "vendor.acme"): "NotImplementedError: not these"}
    some = acme(right, supports=lambda x: True if x.abs().max() > 5 else "small")
    plan = planned_as_first(some)
    model = nn.ModuleDict({"early": Act(plan), "late": Act(plan)})
    live = Live(plan, {"": model}, CPU)
    with live.watching():
        model["early"](torch.randn(8, 32).clamp(-1, 1))
        model["late"](torch.randn(8, 32) * 100)
    assert not live.refused and len(live.served) == 2


def test_a_later_candidate_that_refuses_is_not_looked_at() -> None:
    """It is asked what the first one refuses, and may take other calls."""
    plan = plan_of(
        acme(right, supports=lambda x: len(x) < 9 or "large"),
        refusing("reference.torch", "never", fn=right),
        silu("default.flagos", fn=right),
        per_op_order={"silu_and_mul": ["vendor", "reference", "flagos"]},
    )
    bound = plan.bind("silu_and_mul", object(), frozenset())
    live = Live(plan, {}, CPU)
    with live.watching():
        bound(torch.randn(4, 32))
        bound(torch.randn(12, 32))
    assert not live.refused


def test_counters_begin_when_it_has_ended() -> None:
    plan = planned_as_first(refusing("vendor.acme", "no such rows", fn=right))
    plan.fallbacks["attention_backend", "stock.vllm"] += 1  # chosen while the model was built
    seen(plan)
    assert not plan.record.refusals and not plan.calls
    assert plan.fallbacks == {("attention_backend", "stock.vllm"): 1}


@pytest.mark.parametrize("where", ["fn", "fn, later", "supports"])
def test_what_hangs_is_named_and_noted(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also in a call that is not compared, and where it is asked whether it takes one."""
    monkeypatch.setattr(breadcrumb, "SLOW", 1.0)
    noted: list[str] = []

    def slow(call: int) -> None:
        noted.append(breadcrumb.now())
        if len(noted) == call:
            while not any("has been running" in each.msg for each in caplog.records):
                time.sleep(0.01)

    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        if where != "supports":
            slow(2 if "later" in where else 1)
        return right(x)

    def asked(x: torch.Tensor) -> bool:
        if where == "supports":
            slow(1)
        return True

    live = seen(plan_of(acme(silu_and_mul, supports=asked)))
    assert not live.faults and len(noted) == 3
    assert all("silu_and_mul=vendor.acme on live tensors in layer layers." in n for n in noted)
    said = [each.getMessage() for each in caplog.records if "has been running" in each.msg]
    assert len(said) == 1 and "silu_and_mul=vendor.acme" in said[0]
