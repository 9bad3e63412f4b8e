"""Ops that replace PyTorch's and vLLM's operators in graphs compiled by vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import linear, silu

pytest.importorskip("vllm", reason="vLLM is not installed")

import vllm.platforms
from builders import engine_of, kind_of, managing, planning
from torch._dynamo.backends.common import aot_autograd
from torch._guards import detect_fake_mode
from torch._inductor.virtualized import V
from tracing import OP, PATCHER, ROWS, applied, config, traced
from vllm.compilation.passes.inductor_pass import pass_context
from vllm.config.utils import Range as VllmRange

from vllm_fl.engine.facts import EngineFacts
from vllm_fl.engine.plan import Plan
from vllm_fl.errors import AllFailedError
from vllm_fl.integration.graphs import replacing
from vllm_fl.integration.graphs.state import in_graphs
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.types import OpImpl
from vllm_fl.settings.loading import load_settings


def product(impl_id: str = "vendor.acme", **fields: Any) -> OpImpl:
    """A `linear` with 1 added to its result."""

    def fn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        return linear(x, weight, bias) + 1

    kind, vendor = kind_of(impl_id)
    return OpImpl(OP, impl_id, kind, fields.pop("fn", fn), vendor, **fields)


def planned(order: Any, *impls: OpImpl) -> Plan:
    return planning(managing(*(impls or (product(),)), per_op_order={OP: order}), "compiled")


def passed(
    plan: Plan, function: Callable[..., Any], *args: Any, sizes: tuple[int, int] = (1, 16)
) -> tuple[Any, bool]:
    """(the result of a range's graph after the pass, whether our operator is in the graph)."""
    is_range = sizes[0] < sizes[1]
    with traced(function, args, [is_range, *[False] * (len(args) - 1)]) as (mode, module):
        run = replacing.TorchOperators(applied(plan), config([16]))
        with V.set_fake_mode(mode), pass_context(VllmRange(*sizes)):
            run(module.graph)
    module.graph.lint()
    module.recompile()
    ours = any(str(node.target).startswith("vllm_fl.") for node in module.graph.nodes)
    return module(*args), ours


X, WEIGHT, BIAS = torch.randn(5, 24), torch.randn(32, 24), torch.randn(32)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (linear, (X, WEIGHT)),
        (linear, (X, WEIGHT, BIAS)),
        (lambda x, w: linear(x * 2, w).relu() - 1, (X, WEIGHT)),
        (lambda x, w: torch.mm(x, w.permute(1, 0)), (X, WEIGHT)),
        (lambda x, w: linear(linear(x, w), w[:, :].new_ones(3, 32)), (X, WEIGHT)),
    ],
)
def test_products_of_a_graph_are_the_plans(function: Any, args: Any) -> None:
    result, ours = passed(planned(["vendor"]), function, *args)
    assert ours and not torch.allclose(result, function(*args))
    right = planned(["vendor"], product(fn=linear))
    result, ours = passed(right, function, *args)
    assert ours
    torch.testing.assert_close(result, function(*args))


@pytest.mark.parametrize(
    ("function", "args"),
    [
        pytest.param(torch.mm, (X, WEIGHT.t().contiguous()), id="a weight that is not turned"),
        pytest.param(lambda x, w: torch.mm(x, (w * 2).t()), (X, WEIGHT), id="no input"),
        pytest.param(lambda x, w: torch.mm(x, w.t()), (X, WEIGHT.t().contiguous().t()), id="rows"),
        pytest.param(
            lambda x, w, b: torch.addmm(b, x, w.t()), (X, WEIGHT, torch.ones(5, 32)), id="a sum"
        ),
        pytest.param(
            lambda x, w, b: torch.addmm(b, x, w.t(), alpha=2), (X, WEIGHT, BIAS), id="a factor"
        ),
        pytest.param(
            lambda x, w: (x.unsqueeze(1) * w.unsqueeze(0)).sum(dim=[1]), (X, WEIGHT), id="weights"
        ),
    ],
)
def test_what_is_no_product_with_a_turned_weight_stays(function: Any, args: Any) -> None:
    plan = planned(["vendor"])
    result, ours = passed(plan, function, *args)
    assert not ours and torch.equal(result, function(*args))
    (known,) = in_graphs(engine_of(plan)).sites.values()
    assert (known.graphs, known.found) == (1, 0)


@pytest.mark.parametrize(("sizes", "ours"), [((1, 16), True), ((1, 64), True), ((17, 64), False)])
def test_a_range_that_is_left_to_vllm_is_as_without_us(sizes: tuple[int, int], ours: bool) -> None:
    plan = planned(ROWS)
    for rows in (5, 40):
        x = torch.randn(rows, 24)
        result, there = passed(plan, linear, x, WEIGHT, sizes=sizes)
        assert there is ours
        # An operator for several rows selects the row by the call's tokens.
        torch.testing.assert_close(result, linear(x, WEIGHT) + (ours and rows <= 16))
    (known,) = in_graphs(engine_of(plan)).sites.values()
    assert (known.graphs, known.found) == ((1, 1) if ours else (0, 0))


def test_a_refusal_falls_back_inside_the_operator() -> None:
    def supports(x: Any, weight: Any, bias: Any = None) -> Any:
        return True if x.dtype is torch.bfloat16 else f"x is {x.dtype}"

    plan = planned(["vendor"], product(supports=supports))
    result, ours = passed(plan, linear, X, WEIGHT)
    assert ours and torch.equal(result, linear(X, WEIGHT))
    assert plan.record.refusals == {(OP, "vendor.acme"): 1}
    both = planned(["vendor", "flagos"], product(supports=supports), product("default.flagos"))
    result, ours = passed(both, linear, X, WEIGHT)
    assert ours
    torch.testing.assert_close(result, linear(X, WEIGHT) + 1)


def test_strict_a_refusal_is_raised_and_not_passed_over() -> None:
    manager = managing(
        product(supports=lambda x, weight, bias=None: "odd"),
        per_op_order={OP: ["vendor"]},
        strict=True,
    )
    with pytest.raises(AllFailedError, match="does not support a call of op 'linear': odd"):
        passed(planning(manager, "compiled"), linear, X, WEIGHT)


def facts(mode: Any = "compiled", **fields: Any) -> EngineFacts:
    return replace(EngineFacts(load_settings({}), mode), **{"by_range": True, **fields})


def test_where_no_pass_of_ours_runs_it_is_left_to_pytorch_and_says_why() -> None:
    assert OP not in PATCHER.why_not(facts()).ops
    for engine, word in (
        (facts("eager"), "compiled mode"),
        (facts(by_range=False), "compiler"),
        (facts(batch_invariant=True), "VLLM_BATCH_INVARIANT"),
    ):
        assert word in PATCHER.why_not(engine).ops[OP]


def test_a_reference_is_what_the_graph_has_already() -> None:
    reference, vendor = product("reference.torch", traceable=True), product()
    assert OP in PATCHER.keep_stock(planned(["reference"], reference, vendor))
    assert not PATCHER.keep_stock(planned(["vendor"], reference, vendor))
    assert not PATCHER.keep_stock(
        planned({"<=16": "vendor", "rest": "reference"}, reference, vendor)
    )


def test_an_op_with_a_planned_part_keeps_vllms_operator() -> None:
    kind, vendor = kind_of("vendor.acme")

    def left(**orders: Any) -> dict[str, str]:
        impls = (OpImpl(op, "vendor.acme", kind, lambda *args: None, vendor) for op in orders)
        return PATCHER.keep_stock(planning(managing(*impls, per_op_order=orders), "compiled"))

    assert not left(linear_silu_and_mul=["vendor"], silu_and_mul=["stock"])
    for order in (["vendor"], ROWS):
        found = left(linear_silu_and_mul=["vendor"], silu_and_mul=order)
        assert "silu_and_mul is planned, so" in found["linear_silu_and_mul"]


GATED = "linear_silu_and_mul"


def whole(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A `linear_silu_and_mul` with a recognisably different result."""
    return linear(x, weight)[:, : len(weight) // 2] + 2


def first_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = linear(x, weight).chunk(2, dim=-1)
    return silu(gate) * up


def both_planned() -> Plan:
    """A plan with `linear`, and with the op that includes more operators."""
    kind, vendor = kind_of("vendor.acme")
    gated = OpImpl(GATED, "vendor.acme", kind, whole, vendor)
    order = {OP: ["vendor"], GATED: ["vendor"]}
    return planning(managing(product(), gated, per_op_order=order), "compiled")


def counts(plan: Plan) -> tuple[int, int]:
    sites = in_graphs(engine_of(plan)).sites
    return sites[OP].found, sites[GATED].found


def test_an_op_of_several_operators_is_found_before_one_of_them_is() -> None:
    def two(x: torch.Tensor, weight: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = linear(first_of(x, weight), down)
        return x

    plan, down = both_planned(), torch.randn(24, 16)
    result, _ = passed(plan, two, X, WEIGHT, down)
    middle = linear(whole(X, WEIGHT), down) + 1
    torch.testing.assert_close(result, linear(whole(middle, WEIGHT), down) + 1)
    assert counts(plan) == (2, 2)


@pytest.mark.parametrize(
    ("last", "found"),
    [
        (lambda y, gate, up: (silu(gate) * up, y), (1, 0)),
        (lambda y, gate, up: (silu(gate) * up, gate), (1, 0)),
        (lambda y, gate, up: (silu(gate) * up, silu(gate) * up), (1, 0)),
        (lambda y, gate, up: (silu(gate) * up, up.exp()), (1, 0)),
        (lambda y, gate, up: [silu(gate) * up] * 2, (0, 1)),
    ],
)
def test_what_else_is_read_of_a_product_stays(last: Any, found: tuple[int, int]) -> None:
    def function(product_of: Any, x: torch.Tensor, weight: torch.Tensor) -> Any:
        y = product_of(x, weight)
        return last(y, *y.chunk(2, dim=-1))

    plan = both_planned()
    result, _ = passed(plan, partial(function, linear), X, WEIGHT)
    assert counts(plan) == found
    right = function(lambda *args: linear(*args) + 1, X, WEIGHT)
    torch.testing.assert_close([*result], [whole(X, WEIGHT)] * 2 if found[1] else [*right])


def test_what_has_an_effect_stays_though_nothing_reads_it() -> None:
    def function(x: torch.Tensor, weight: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        torch._assert_async(cache.sum() == 0, "the cache is full")
        result = first_of(x, weight)
        cache.copy_(first_of(x, weight))
        return result

    cache = torch.zeros(5, 16)
    plan = both_planned()
    result, _ = passed(plan, function, X, WEIGHT, cache)
    assert torch.equal(cache, result) and torch.equal(result, whole(X, WEIGHT))
    with pytest.raises(RuntimeError, match="the cache is full"):
        passed(both_planned(), function, X, WEIGHT, cache)


FP8 = "linear_fp8"
VLLMS = "_C.cutlass_scaled_mm.default"


@pytest.fixture(name="vllms_product")
def _vllms_product() -> Iterator[None]:
    """Define the operator that vLLM's CPU build lacks."""
    library = torch.library.Library("_C", "FRAGMENT")
    library.define(
        "cutlass_scaled_mm(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, "
        "Tensor? bias) -> ()"
    )

    def kernel(out: Any, a: Any, b: Any, a_scales: Any, b_scales: Any, bias: Any = None) -> None:
        if a_scales.shape[1:] > (1,):  # scales of blocks: no test checks this result
            out.zero_()
            return
        result = (a.float() @ b.float()) * a_scales * b_scales.reshape(1, -1)
        out.copy_(result if bias is None else result + bias)

    library.impl("cutlass_scaled_mm", kernel, "CPU")
    yield
    library._destroy()


def scaled(a: Any, b: Any, a_scales: Any, b_scales: Any, bias: Any = None) -> torch.Tensor:
    out = torch.empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16)
    torch.ops._C.cutlass_scaled_mm(out, a, b, a_scales, b_scales, bias)
    return out.view(a.shape[0], b.shape[1])


def of_fp8(impl_id: str = "vendor.acme", **fields: Any) -> OpImpl:
    """A `linear_fp8` with 1 added to its result."""

    def fn(
        x: Any, weight: Any, x_scale: Any, weight_scale: Any, out_dtype: str, bias: Any = None
    ) -> Any:
        args = x, weight, x_scale, weight_scale, out_dtype, bias
        return (known_contracts().contracts[FP8].oracle(*args) + 1).to(getattr(torch, out_dtype))

    return OpImpl(FP8, impl_id, kind_of(impl_id)[0], fn, kind_of(impl_id)[1], **fields)


def compiled(
    plan: Plan | None, *args: Any, sizes: tuple[int, int] = (1, 16)
) -> tuple[torch.Tensor, str]:
    """(result of vLLM's product, graph code after the pass if there is a plan)."""
    codes, unknowns = [], []

    def lower(module: torch.fx.GraphModule, _: Any) -> Any:
        values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
        mode = detect_fake_mode(values)
        assert mode is not None and mode.shape_env is not None
        known = len(mode.shape_env.guards), dict(mode.shape_env.replacements)
        if plan is not None:
            with V.set_fake_mode(mode), pass_context(VllmRange(*sizes)):
                replacing.TorchOperators(applied(plan), config([16]))(module.graph)
        unknowns.append(known == (len(mode.shape_env.guards), mode.shape_env.replacements))
        module.graph.lint()
        module.recompile()
        codes.append(module.code)
        return module.forward

    torch._dynamo.reset()
    for each in args:
        if each is not None and each.shape[:1] == args[0].shape[:1]:
            torch._dynamo.mark_dynamic(each, 0)
    with torch._inductor.config.patch(enable_auto_functionalized_v2=False), torch.no_grad():
        backend = aot_autograd(fw_compiler=lower)
        result = torch.compile(scaled, backend=backend, fullgraph=True)(*args)
    assert unknowns == [True], "two numbers of tokens were joined, or one was fixed"
    return result, *codes


def fp8_call(tokens: int = 5, **changed: Any) -> tuple[Any, ...]:
    call = {
        "a": torch.randn(tokens, 48).to(torch.float8_e4m3fn),
        "b": torch.randn(32, 48).to(torch.float8_e4m3fn).t(),
        "a_scales": torch.rand(tokens, 1),
        "b_scales": torch.rand(32, 1),
        "bias": torch.randn(32).bfloat16(),
    }
    return tuple({**call, **changed}.values())


ONE = torch.tensor([0.5])


@pytest.mark.usefixtures("vllms_product")
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"a_scales": ONE, "b_scales": ONE},
        {"a_scales": ONE[:, None], "b_scales": ONE[:, None]},
        {"b_scales": torch.rand(32)},
        {"b": torch.randn(48, 32).to(torch.float8_e4m3fn)},
    ],
    ids=lambda changed: ", ".join(changed) or "each row's scale",
)
def test_vllms_own_product_is_the_plans_where_it_is_planned(changed: dict[str, Any]) -> None:
    plan = planning(managing(of_fp8(), per_op_order={FP8: ROWS}), "compiled")
    for tokens, sizes, ours in ((5, (1, 16), True), (40, (17, 64), False), (5, (1, 64), True)):
        args = fp8_call(tokens, **changed)
        result, code = compiled(plan, *args, sizes=sizes)
        assert ("vllm_fl" in code, VLLMS in code) == (ours, not ours), code
        torch.testing.assert_close(result.float(), scaled(*args).float() + ours, atol=0.1, rtol=0.1)
    (known,) = in_graphs(engine_of(plan)).sites.values()
    assert (known.graphs, known.found) == (1, 1)


BLOCKS = {"a_scales": torch.rand(5, 3), "b_scales": torch.rand(3, 2)}
INT8 = {"a": torch.ones(5, 48).char(), "b": torch.ones(32, 48).char().t()}


@pytest.mark.usefixtures("vllms_product")
@pytest.mark.parametrize("changed", [BLOCKS, INT8], ids=["blocks", "int8"])
def test_what_else_vllms_product_computes_stays_its_own(changed: dict[str, Any]) -> None:
    plan = planning(managing(of_fp8(), per_op_order={FP8: "vendor"}), "compiled")
    args = fp8_call(**changed)
    assert compiled(plan, *args)[1] == compiled(None, *args)[1]


CHANNELS = {
    "weights": {"type": "float", "num_bits": 8, "strategy": "channel"},
    "input_activations": {"type": "float", "num_bits": 8, "strategy": "token"},
}
WEIGHTS = CHANNELS | {"input_activations": None}


@pytest.mark.parametrize(
    ("op", "quantization", "configured", "has"),
    [
        (OP, None, None, True),
        (OP, "fp8", None, False),
        (FP8, None, None, False),
        (FP8, "fp8", None, True),
        (FP8, "fp8", {"weight_block_size": [128, 128]}, False),
        (FP8, "fp8_per_tensor", None, True),
        (FP8, "fp8_per_block", None, False),
        (FP8, "awq", {"bits": 4}, False),
        (FP8, "modelopt", {"quantization": {"quant_algo": "FP8"}}, True),
        (FP8, "modelopt", {"quant_algo": "FP8_PB_WO"}, False),
        (FP8, "compressed-tensors", {"config_groups": {"group_0": CHANNELS}}, True),
        (FP8, "compressed-tensors", {"config_groups": {"group_0": WEIGHTS}}, False),
    ],
)
def test_models_may_have_the_product_of_their_quantisation(
    op: str, quantization: str | None, configured: Any, has: bool, monkeypatch: Any
) -> None:
    binding = known_contracts().bindings[op]
    assert binding.when is not None
    hf = SimpleNamespace(**({"quantization_config": configured} if configured else {}))
    engine = SimpleNamespace(model_config=SimpleNamespace(quantization=quantization, hf_config=hf))
    assert binding.when(engine) is False, "vLLM's CPU platform packs weights, and has other kernels"
    monkeypatch.setattr(vllm.platforms.current_platform, "is_cpu", lambda: False)
    assert binding.when(engine) is has
