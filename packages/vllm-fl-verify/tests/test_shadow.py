"""Shadow checks without an engine: which steps they sample, what they see, what stays unchanged."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import managing, planning, silu
from of_acme import acme
from of_acme import silu_and_mul as right
from oracle_mutants import oracle_impl
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_fl.engine.plan import Plan
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.types import OpImpl
from vllm_fl_verify import shadow as module
from vllm_fl_verify.shadow import Shadow

OP = "silu_and_mul"
NORM = oracle_impl(known_contracts().contracts["rms_norm"])
VENDOR = {op: ["vendor"] for op in (OP, "rms_norm", "moe_topk", "reshape_and_cache")}


def fused(fn: Callable[..., Any], **fields: Any) -> OpImpl:
    return silu("vendor.acme", fn=fn, **fields)


def plan_of(*impls: OpImpl, mode: Any = "eager") -> Plan:
    return planning(managing(*impls, per_op_order=VENDOR), mode)


def bound_of(plan: Plan, op: str = OP, layer: object = None) -> Callable[..., Any]:
    spec = known_contracts().contracts[op]
    return plan.bind(op, layer or SimpleNamespace(), spec.consumable)


def seen(shadow: Shadow, op: str = OP) -> dict[str, Any]:
    """Bucket -> tally of the vendor's implementation."""
    report = shadow.report()
    json.dumps(report, allow_nan=False)
    return report["compared"].get(op, {}).get("vendor.acme", {})


def compared(shadow: Shadow) -> int:
    return sum(tally.calls for tally in shadow.seen.values())


@pytest.mark.parametrize("rate", [0.01, 0.37, 1.0])
def test_the_share_of_steps_is_the_rate_over_any_stretch_and_no_period_is_met(rate: float) -> None:
    shadow = Shadow(plan_of(fused(right)), rate)
    taken = [shadow.takes_step() for _ in range(10_000)]
    assert shadow.steps == 10_000 and shadow.sampled == sum(taken)
    for period in (1, 2, 7, 100):
        for offset in (0, period // 2):
            share = sum(taken[offset::period]) / len(taken[offset::period])
            assert share == pytest.approx(rate, abs=0.03), (period, offset)
    at = [step for step, is_taken in enumerate(taken) if is_taken]
    assert max(b - a for a, b in pairwise(at)) <= 2 / rate, "what is wrong does not wait long"
    again = Shadow(plan_of(fused(right)), rate)
    assert [again.takes_step() for _ in range(10_000)] == taken, "every rank takes the same steps"


@pytest.mark.parametrize("traceable", [False, True])
def test_a_compiler_sees_the_same_graph_and_compiles_once(traceable: bool) -> None:
    """No wrapper stays: a compiler traces the same function as without shadow checks."""
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph.code)
        return graph

    def compiled() -> Callable[..., Any]:
        torch._dynamo.reset()
        compiled: Callable[..., Any] = torch.compile(lambda x: bound(x) + 1, backend=backend)
        return compiled

    plan = plan_of(fused(right, traceable=traceable), mode="compiled")
    bound, x = bound_of(plan), torch.randn(4, 16)
    without = compiled()
    without(x)
    shadow = Shadow(plan, 1.0)
    with shadow.comparing():
        bound(x)
    without(x)
    assert len(graphs) == 1, "a sampled step leaves compiled code valid"
    compiled()(x)
    bound(x)
    assert graphs[0] == graphs[1]
    assert [tally["calls"] for tally in seen(shadow).values()] == [1], "only what is inside"


@pytest.mark.parametrize(
    ("mode", "traceable"), [("eager", False), ("compiled", False), ("compiled", True)]
)
def test_a_right_implementation_is_within_the_tolerance(mode: Any, traceable: bool) -> None:
    plan = plan_of(fused(right, traceable=traceable), mode=mode)
    bound, shadow = bound_of(plan), Shadow(plan, 1.0)
    with torch.inference_mode(), shadow.comparing():
        for tokens in (1, 2, 3, 4, 16, 700):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                bound(torch.randn(tokens, 64).to(dtype))
    found = seen(shadow)
    calls = {bucket: tally["calls"] for bucket, tally in found.items()}
    assert calls == {"1": 3, "2": 3, "4": 6, "16": 3, "1024": 3}
    assert all(0 < tally["share"] <= 1 and not tally["wrong"] for tally in found.values()), found
    assert all(tally["relative"] < 0.01 for tally in found.values())
    assert shadow.left == {} and not shadow.too_large


def test_an_error_that_begins_while_serving_is_seen_and_named_by_its_size() -> None:
    calls = 0

    def drifting(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        result = right(x)
        if calls > 500 and len(x) > 8:
            result[3, 5] += 0.5
        return result

    plan = plan_of(fused(drifting))
    bound, shadow = bound_of(plan), Shadow(plan, 0.1)
    for _ in range(400):
        with shadow.comparing() if shadow.takes_step() else nullcontext():
            [bound(torch.randn(n, 64, dtype=torch.bfloat16)) for n in (1, 16)]
    found = seen(shadow)
    assert not found["1"]["wrong"] and found["1"]["share"] <= 1
    assert found["16"]["wrong"] and found["16"]["share"] > 5
    assert found["16"]["wrong"] < found["16"]["calls"], "it was right before"


@pytest.mark.parametrize(("value", "field"), [(math.nan, "nan"), (math.inf, "inf")])
def test_nan_and_infinity_are_counted_by_element(value: float, field: str) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        result = right(x)
        result[0, :3] = value
        return result

    plan = plan_of(fused(broken))
    bound, shadow = bound_of(plan), Shadow(plan, 1.0)
    with shadow.comparing():
        bound(torch.randn(2, 16))
        bound(torch.randn(2, 16))
    (tally,) = seen(shadow).values()
    assert tally[field] == 6 and tally["wrong"] == 2
    assert tally["relative"] < 1e-5, "what is finite is right"


def test_what_the_oracle_makes_infinite_or_nan_is_right() -> None:
    plan = plan_of(fused(right))
    bound, shadow = bound_of(plan), Shadow(plan, 1.0)
    x = torch.randn(4, 16, dtype=torch.float16)
    x[0, 0], x[1, 1], x[2, 0], x[2, 8] = math.nan, math.inf, 60000.0, 60000.0
    with shadow.comparing():
        bound(x)
    (tally,) = seen(shadow).values()
    assert (tally["wrong"], tally["nan"], tally["inf"]) == (0, 0, 0), tally


def in_place(x: Any, residual: Any, *rest: Any) -> Any:
    """A norm that writes its results into its arguments, like vLLM's kernels."""
    results = NORM.fn(x, residual, *rest)
    return results if residual is None else (x.copy_(results[0]), residual.copy_(results[1]))


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_arguments_that_are_overwritten_are_read_before(mode: Any) -> None:
    plan = plan_of(acme("rms_norm", in_place, consumes=frozenset({"x", "residual"})), mode=mode)
    layer = SimpleNamespace(
        weight=torch.nn.Parameter(torch.rand(64) + 0.5), variance_epsilon=1e-6, has_weight=True
    )
    bound, shadow = bound_of(plan, "rms_norm", layer), Shadow(plan, 1.0)
    x, residual = torch.randn(9, 64), torch.randn(9, 64)
    with torch.inference_mode(), shadow.comparing():
        normed, _ = bound(x, residual)
    assert normed.data_ptr() == x.data_ptr(), "the comparison changes nothing for the caller"
    (tally,) = seen(shadow, "rms_norm").values()
    assert tally["calls"] == 1 and not tally["wrong"], tally


def test_of_a_large_call_every_row_has_its_turn() -> None:
    at = 900

    def one_row_wrong(x: torch.Tensor) -> torch.Tensor:
        result = right(x)
        result[at] += 10
        return result

    plan = plan_of(fused(one_row_wrong))
    bound, shadow = bound_of(plan), Shadow(plan, 1.0)
    for _ in range(4):
        shadow.takes_step()
        with shadow.comparing():
            bound(torch.randn(1024, 16))
    assert seen(shadow)["1024"]["wrong"] == 1


class Deep:
    """A plan called for many layers, incorrect where `is_wrong` returns True."""

    def __init__(self, layers: int) -> None:
        self.layers, self.layer = layers, 0
        self.is_wrong: Callable[[int, int], bool] = lambda layer, tokens: False

        def fn(x: torch.Tensor) -> torch.Tensor:
            result = right(x)
            if self.is_wrong(self.layer, len(x)):
                result[-1] += 10
            return result

        order = {OP: ["vendor"], "rms_norm": ["vendor"]}
        impls = fused(fn), acme("rms_norm", in_place)
        plan = planning(managing(*impls, per_op_order=order), "eager")
        layer = SimpleNamespace(weight=torch.nn.Parameter(torch.ones(8)), variance_epsilon=1e-6)
        self.bound, self.normed = bound_of(plan), bound_of(plan, "rms_norm", layer)
        self.shadow = Shadow(plan, 1.0)

    def step(self, tokens: int = 1, *, norms: int = 0) -> bool:
        """One sampled step; whether it reports an incorrect call."""
        before = sum(tally["wrong"] for tally in seen(self.shadow).values())
        self.shadow.takes_step()
        with self.shadow.comparing():
            for layer in range(self.layers):
                self.layer = layer
                self.bound(torch.randn(tokens, 8))
            for _ in range(norms):
                self.normed(torch.randn(tokens, 8))
        return sum(tally["wrong"] for tally in seen(self.shadow).values()) > before

    def steps_until_off(self, *sizes: int, at_most: int, norms: int = 0) -> int:
        """Number of steps of these sizes, in turn, until a step reports an incorrect call."""
        for number in range(at_most):
            if self.step(sizes[number % len(sizes)], norms=norms):
                return number + 1
        return at_most + 1

    @property
    def counts(self) -> tuple[int, int]:
        """(calls that were seen, calls that were compared)."""
        tallies = self.shadow.seen.values()
        return sum(t.seen for t in tallies), sum(t.calls for t in tallies)


def test_a_deeper_model_has_no_more_calls_compared_and_each_has_its_turn() -> None:
    deep = Deep(200)
    deep.step(norms=400)
    assert deep.counts == (600, 2 * module.CALLS), "how many there would be was not known"
    turns = -(-600 // module.CALLS)
    for _ in range(turns):
        before = deep.counts
        deep.step(norms=400)
        seen_now, compared = (now - was for now, was in zip(deep.counts, before, strict=True))
        assert seen_now == 600 and compared <= module.CALLS + 2
    assert deep.counts[1] == 2 * module.CALLS + 600, "each of them, once"


@pytest.mark.parametrize("layer", [0, 77, 199])
def test_one_layer_that_begins_to_be_wrong_is_named_within_a_round(layer: int) -> None:
    deep = Deep(200)
    for _ in range(layer % 7):
        deep.step(norms=40)
    deep.is_wrong = lambda at, tokens: at == layer
    turns = -(-240 // module.CALLS)
    assert deep.steps_until_off(1, at_most=turns + 1, norms=40) <= turns + 1


@pytest.mark.parametrize(("sizes", "layer"), [((1, 16), 7), ((16, 2, 1, 2), 3)])
def test_no_order_of_sizes_hides_a_layer_at_one_of_them(
    sizes: tuple[int, ...], layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CALLS", 2)
    deep = Deep(8)
    deep.is_wrong = lambda at, tokens: at == layer and tokens == 16
    assert deep.steps_until_off(*sizes, at_most=4 * len(sizes) + 4) <= 4 * len(sizes) + 4


def test_ranks_that_make_the_same_calls_compare_the_same_ones() -> None:
    """One rank fails to compare a call of another op."""
    ranks = Deep(100), Deep(100)
    for number in range(12):
        for rank in ranks:
            torch.manual_seed(number)  # each call has its own relative error
            if number == 5 and rank is ranks[0]:
                rank.shadow.left["rms_norm"] = "out of memory"
            rank.step([1, 3, 16][number % 3], norms=100)
        one, other = (seen(rank.shadow) for rank in ranks)
        assert one == other


WAITING = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select"}
"""Operators of torch with a result that the host needs; some only occur in inference mode."""


class Waits(TorchDispatchMode):
    """Records operators that make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__.partition(".")[0]
        indices = args[1] if name == "index" else ()
        by_mask = any(at is not None and at.dtype is torch.bool for at in indices)
        if by_mask or name in WAITING:
            self.found.add(name)
        return func(*args, **(kwargs or {}))


def test_a_call_that_needs_too_much_memory_is_left_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LARGEST", 1000)
    plan = plan_of(fused(right))
    bound, shadow = bound_of(plan), Shadow(plan, 1.0)
    with shadow.comparing():
        bound(torch.randn(4, 64))
        bound(torch.randn(1, 64))
    assert {n: (tally["seen"], tally["calls"]) for n, tally in seen(shadow).items()} == {
        "1": (1, 1),
        "4": (1, 0),
    }
    assert shadow.report()["too_large"] == {OP: 1}


def test_a_comparison_that_fails_harms_no_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_of(fused(right))
    bound, shadow = bound_of(plan), Shadow(plan, 1.0)

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("nothing is left")

    monkeypatch.setattr(module, "wanted_here", full)
    x = torch.randn(2, 16)
    with shadow.comparing():
        assert torch.equal(bound(x), right(x))
        assert torch.equal(bound(x), right(x))
    assert "nothing is left" in shadow.report()["left"][OP]
    said = [record for record in caplog.records if record.name == "vllm_fl.engine"]
    assert len(said) == 1 and compared(shadow) == 0


def test_what_an_implementation_raises_is_raised_and_refusals_still_fall_back() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("boom") if len(x) > 1 else NotImplementedError("one row")

    other = silu("reference.torch", fn=right)
    order = {OP: ["vendor", "reference"]}
    plan = planning(managing(fused(fails), other, per_op_order=order), "eager")
    bound, shadow = bound_of(plan), Shadow(plan, 1.0)
    with shadow.comparing():
        with pytest.raises(RuntimeError, match="boom"):
            bound(torch.randn(2, 16))
        bound(torch.randn(1, 16))
    assert plan.fallbacks == {(OP, "reference.torch"): 1}
    assert compared(shadow) == 0


@pytest.mark.parametrize(
    ("op", "why"), [("moe_topk", "Routing"), ("reshape_and_cache", "on other tokens or a cache")]
)
def test_what_cannot_be_compared_is_named(op: str, why: str) -> None:
    impl = oracle_impl(known_contracts().contracts[op])
    assert why in Shadow(plan_of(impl), 1.0).report()["left"][op]


@pytest.mark.parametrize("op", ["silu_and_mul", "rms_norm", "linear", "rotary_embedding"])
def test_right_results_are_within_the_tolerance_and_no_comparison_waits(op: str) -> None:
    """The oracle's results, rounded to their dtype, on every sample."""
    spec = known_contracts().contracts[op]
    plan = planning(managing(oracle_impl(spec), per_op_order={op: ["vendor"]}), "eager")
    shadow = Shadow(plan, 1.0)
    call = plan.without_layer(op, spec.consumable)
    assert call is not None
    waits = Waits()
    compare = shadow._compare

    def watched(*args: Any) -> None:
        with waits:
            compare(*args)

    shadow._compare = watched  # type: ignore[method-assign]
    with torch.inference_mode(), shadow.comparing():
        for sample in spec.samples(torch.bfloat16, torch.device("cpu")):
            if not sample.open_rows:
                call(*sample.args)
    assert not waits.found, "a comparison waits for the device"
    assert shadow.left == {}
    found = seen(shadow, op)
    assert found and not any(tally["wrong"] for tally in found.values()), found
