"""vLLM's norms, and layers for older plugins, built as an engine does but without one."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from builders import engine_of, kind_of, managing, planning
from of_acme import acme
from vllm import ir
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.kernel import IrOpPriorityConfig
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding, get_rope

import vllm_fl.dispatch
from vllm_fl.dispatch.context import building
from vllm_fl.dispatch.manager import OpManager
from vllm_fl.engine.plan import Plan
from vllm_fl.integration import engines
from vllm_fl.integration.patchers import ir as norms
from vllm_fl.integration.patchers.layers import forget_shared_layers, in_tables, ours
from vllm_fl.plugins.types import OpImpl

HIDDEN = 64
IR_OPS = ("rms_norm", "fused_add_rms_norm")


@pytest.fixture(scope="module", autouse=True)
def layers() -> Iterator[None]:
    """A worker's context while it builds the model."""
    with set_current_vllm_config(VllmConfig()), torch.no_grad(), in_tables(ours()):
        yield


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., OpManager]:
    """`use(impl, …)`: install these, with our provider in vLLM's IR."""

    def install(*impls: OpImpl, **policy: Any) -> OpManager:
        # By default vLLM's implementation is tried before the references.
        policy.setdefault("per_op_order", {"rms_norm": ["flagos", "vendor", "reference"]})
        manager = managing(*impls, **policy)
        monkeypatch.setattr(vllm_fl.dispatch.manager, "manager", manager)
        norms.register_provider()
        return manager

    yield install
    engines._thread.engine = None
    for op in IR_OPS:
        getattr(ir.ops, op).impls.pop(norms.PROVIDER, None)
        getattr(ir.ops, op).set_default(["native"])


def norm(impl_id: str, mark: float = 0.0, error: Exception | None = None, **fields: Any) -> OpImpl:
    """A norm with the result x times weight, plus a mark."""

    def rms_norm(x: Any, residual: Any, weight: Any, *_: Any) -> Any:
        if error is not None:
            raise error
        normed = ((x if weight is None else x * weight) + mark).to(x.dtype)
        return normed if residual is None else (normed, x + residual)

    kind, vendor = kind_of(impl_id)
    impl = acme("rms_norm", fields.pop("fn", rms_norm), **fields)
    return dataclasses.replace(impl, impl_id=impl_id, kind=kind, vendor=vendor)


def built(plan: Plan, cls: Any = RMSNorm, *args: Any, **kwargs: Any) -> Any:
    with building(plan):
        return cls(*args or (HIDDEN,) * (cls is not SiluAndMul), **kwargs)


def served(plan: Plan, digest: str = "digest") -> None:
    """A worker's steps with a sealed plan before the model is built, in this thread."""
    engine = engines._thread.engine = engine_of(plan)
    engine.digest = digest
    norms.Ir().apply(engine)
    priority = norms.prioritise(IrOpPriorityConfig.with_default(["native"]), plan)
    for op in IR_OPS:
        getattr(ir.ops, op).set_default(getattr(priority, op))


def assert_vllms_bits(plan: Plan, cls: Any, tokens: int) -> None:
    layer, x = built(plan, cls), torch.randn(tokens, HIDDEN)
    got = layer(x.clone()), *layer(x.clone(), x.flip(0))
    want = cls.forward_native(layer, x), *cls.forward_native(layer, x.clone(), x.flip(0))
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


X = torch.ones(3, HIDDEN)


class TestEager:
    @pytest.mark.parametrize("cls", [RMSNorm, GemmaRMSNorm])
    def test_the_planned_one_runs_in_every_form_of_the_layer(self, use: Any, cls: Any) -> None:
        plan = planning(use(norm("vendor.acme", 5)), "eager")
        layer = built(plan, cls)
        for call in (layer, layer.forward_native, layer.forward_cuda, layer.forward_oot):
            assert call(X).eq(6).all()
            normed, total = call(X, X.clone())
            assert normed.eq(6).all() and total.eq(2).all()

    @pytest.mark.parametrize("cls", [RMSNorm, GemmaRMSNorm])
    def test_what_all_refuse_is_served_by_vllm(self, use: Any, cls: Any) -> None:
        plan = planning(use(norm("vendor.acme", supports=lambda *args: "not today")), "eager")
        assert_vllms_bits(plan, cls, 3)
        assert plan.fallbacks == {("rms_norm", "stock.vllm"): 2}

    def test_only_rmsnorm_gives_its_arguments_away(self, use: Any) -> None:
        def rms_norm(x: Any, residual: Any, *_: Any) -> Any:
            if residual is None:
                return x * 1
            return x.zero_(), residual.zero_()

        impl = norm("vendor.acme", fn=rms_norm, consumes={"x", "residual"})
        plan = planning(use(impl), "eager")
        for cls, left in ((RMSNorm, 0), (GemmaRMSNorm, 1)):
            x, residual = X.clone(), X.clone()
            built(plan, cls)(x, residual)
            assert x.eq(left).all() and residual.eq(left).all()

    @pytest.mark.parametrize("mode", ["eager", "compiled"])
    def test_the_weight_is_read_at_each_call(self, use: Any, mode: Any) -> None:
        plan = planning(use(norm("vendor.acme")), mode)
        layers = [built(plan), built(plan, GemmaRMSNorm), built(plan, has_weight=False)]
        assert [float(layer(X)[0, 0]) for layer in layers] == [1, 1, 1]
        for layer in layers[:2]:
            layer.weight = torch.nn.Parameter(torch.full((HIDDEN,), 3.0))
        assert [float(layer(X)[0, 0]) for layer in layers] == [3, 4, 1]
        for layer, there, here in ((layers[0], 9, 3), (layers[1], 10, 4)):
            copied = copy.deepcopy(layer)
            copied.weight.data.fill_(9)
            assert copied(X).eq(there).all() and layer(X).eq(here).all()

    def test_epsilon_and_variance_size_are_the_layers(self, use: Any) -> None:
        seen = []

        def rms_norm(x: Any, residual: Any, weight: Any, *rest: Any) -> Any:
            seen.append((*rest, weight.dtype))
            return x

        plan = planning(use(norm("vendor.acme", fn=rms_norm)), "eager")
        built(plan, RMSNorm, HIDDEN, 1e-5, 32)(X)
        built(plan, GemmaRMSNorm, HIDDEN, 1e-3)(X.bfloat16())
        assert seen == [(1e-5, 32, torch.float32), (1e-3, None, torch.float32)]

    def test_a_subclass_of_another_forward_stays_vllms(self, use: Any) -> None:
        class Grouped(RMSNorm):
            def forward(self, x: Any, residual: Any = None) -> Any:
                return -super().forward(x, residual)

        layer = built(planning(use(norm("vendor.acme", 5)), "eager"), Grouped)
        assert layer(X)[0, 0] == pytest.approx(-1, abs=1e-3)

    def test_the_ir_is_vllms(self, use: Any) -> None:
        plan = planning(use(norm("vendor.acme", 5)), "eager")
        served(plan)
        assert all(norms.PROVIDER not in getattr(ir.ops, op).get_priority() for op in IR_OPS)

    def test_an_op_left_to_vllm_is_vllms_own_method(self, use: Any) -> None:
        plan = planning(use(norm("vendor.acme", 5)), "eager", notes={"rms_norm": "the user's"})
        layer = built(plan)
        assert layer.forward_native.__func__ is RMSNorm.forward_native
        kept = planning(use(norm("vendor.acme", 5)), "eager", kept_layers=["GemmaRMSNorm"])
        assert built(kept, GemmaRMSNorm).forward_cuda.__func__ is GemmaRMSNorm.forward_cuda
        assert built(kept)(X).eq(6).all()


class TestBySize:
    """Sizes that are stock run vLLM's code, not the contract's plain form."""

    ORDER = {"rms_norm": {"<=4": "stock", "rest": "vendor"}}  # noqa: RUF012

    @pytest.mark.parametrize("cls", [RMSNorm, GemmaRMSNorm])
    def test_the_bits_are_vllms(self, use: Any, cls: Any) -> None:
        plan = planning(use(norm("vendor.acme", 5), per_op_order=self.ORDER), "eager")
        served(plan)
        assert_vllms_bits(plan, cls, 4)

    @pytest.mark.parametrize("traceable", [True, False])
    def test_compiled_code_goes_by_size(self, use: Any, traceable: bool) -> None:
        impls = norm("vendor.acme", 5, traceable=traceable), norm("default.flagos", 7)
        order = {"rms_norm": {"<=4": "flagos", "<=8": "stock", "rest": "vendor"}}
        plan = planning(use(*impls, per_op_order=order), "compiled")
        served(plan)
        for tokens, mark in ((4, 7), (9, 5)):
            x = torch.ones(tokens, HIDDEN)
            assert ir.ops.rms_norm(x, torch.ones(HIDDEN), 1e-6).eq(1 + mark).all()
            assert ir.ops.fused_add_rms_norm(x, x, None, 1e-6)[0].eq(1 + mark).all()
        x = torch.randn(8, HIDDEN)
        native = ir.ops.rms_norm.impls["native"].impl_fn(x, None, 1e-6)
        assert torch.equal(ir.ops.rms_norm(x, None, 1e-6), native)

    def test_an_activations_own_method_runs_where_it_is_stock(
        self, use: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        impl = acme("silu_and_mul", lambda x: x[..., :4] * 0 + 5)
        order = {"silu_and_mul": {"<=4": "stock", "rest": "vendor"}}
        monkeypatch.setattr(SiluAndMul, "forward_cuda", lambda self, x: x[..., :4] * 0 + 40)
        layer = built(planning(use(impl, per_op_order=order), "eager"), SiluAndMul)
        for tokens, mark in ((4, 40), (5, 5)):
            assert layer.forward_cuda(torch.randn(tokens, 8)).eq(mark).all()


class TestCompiled:
    @pytest.mark.parametrize("traceable", [True, False])
    def test_the_providers_run_what_the_plan_says(self, use: Any, traceable: bool) -> None:
        first = norm("vendor.acme", 5, traceable=traceable)
        served(planning(use(first, norm("reference.torch", 7)), "compiled"))
        weight = torch.ones(HIDDEN)
        assert ir.ops.rms_norm(X, weight, 1e-6).eq(6).all()
        normed, total = ir.ops.fused_add_rms_norm(X, X, weight, 1e-6)
        assert normed.eq(6).all() and total.eq(2).all()

    def test_calls_outside_of_compiled_code_take_the_chain(self, use: Any) -> None:
        first = norm("vendor.acme", error=NotImplementedError("not today"), traceable=True)
        plan = planning(use(first, norm("reference.torch", 5)), "compiled")
        served(plan)
        for cls in (RMSNorm, GemmaRMSNorm):
            layer = built(plan, cls)
            assert layer(X).eq(6).all() and layer.forward_native(X).eq(6).all()
        assert plan.fallbacks == {("rms_norm", "reference.torch"): 4}

    def test_compiled_code_has_the_op_of_the_ir(self, use: Any) -> None:
        plan = planning(use(norm("vendor.acme", 5)), "compiled")
        served(plan)

        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.one, self.other = RMSNorm(HIDDEN), GemmaRMSNorm(HIDDEN)

            def forward(self, x: torch.Tensor, residual: torch.Tensor) -> Any:
                # plamo-3 and AIMv2 call this form by name
                return self.other(self.one.forward_native(x), residual)

        with building(plan):
            model = Model()
        graphs = []

        def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        torch._dynamo.reset()
        torch.compile(model, fullgraph=True, backend=backend)(X, X)
        assert "vllm_ir.rms_norm" in graphs[0].code
        assert "vllm_ir.fused_add_rms_norm" in graphs[0].code

    def test_the_caches_know_a_provider_by_the_plans_digest(self, use: Any) -> None:
        plan = planning(use(norm("vendor.acme")), "compiled")
        for digest in ("one", "other"):
            served(plan, digest)
            for op in IR_OPS:
                (provider, *_) = getattr(ir.ops, op).get_priority()
                assert getattr(ir.ops, op).impls[provider].uuid() == digest


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_of_two_engines_each_keeps_its_own_norms(use: Any, mode: Any) -> None:
    impls = (norm("vendor.acme", 5), norm("reference.torch", 7))
    layers = []
    for kind in ("vendor", "reference"):
        plan = planning(use(*impls, per_op_order={"rms_norm": [kind]}), mode)
        served(plan, kind)
        layers.append(built(plan))
    one, other = layers
    assert one(X).eq(6).all() and other(X).eq(8).all() and one(X).eq(6).all()


def test_of_two_engines_each_has_its_own_ropes(use: Any) -> None:
    """vLLM keeps one rope for all layers of a process that have the same sizes."""
    plans, ropes = [], []
    for _ in range(2):
        plan = planning(use(acme("rotary_embedding", older_rope, "older")), "eager")
        plans.append(dataclasses.replace(plan, counts_calls=True))
        forget_shared_layers()
        parameters = {"rope_type": "default", "rope_theta": 10000}
        with building(plans[-1]):
            ropes.append([get_rope(8, 32, rope_parameters=parameters) for _ in range(2)])
    assert ropes[0][0] is ropes[0][1] and ropes[1][0] is ropes[1][1]
    for rope in (ropes[0][0], ropes[1][0], ropes[0][1]):
        rope(torch.arange(3), torch.zeros(3, 16), torch.zeros(3, 16))
    calls = [plan.calls["rotary_embedding", "vendor.older"] for plan in plans]
    assert calls == [2, 1]


def older_rope(obj, query, key, cos, sin, position_ids, rotary_interleaved=False, inplace=True):
    """A function of the older form; the first argument is the layer."""
    assert query.shape[1:] == (2, obj.head_size) and inplace and not rotary_interleaved
    return query.add_(1), key.add_(2)


def test_an_older_form_gets_every_layer(use: Any) -> None:
    def rms_norm(obj: Any, x: Any, residual: Any = None) -> Any:
        normed = x * obj.weight + obj.variance_epsilon
        return normed if residual is None else (normed, x + residual)

    plan = planning(use(acme("rms_norm", rms_norm, "older")), "eager")
    x = torch.full((3, HIDDEN), 2.0)
    for cls, want in ((RMSNorm, 4.0), (GemmaRMSNorm, 6.0)):
        layer = built(plan, cls, HIDDEN, 0.5)
        layer.weight.data.fill_(1.75)
        assert layer(x).eq(want).all()
        normed, total = layer(x, x.clone())
        assert torch.equal(normed, layer(x)) and total.eq(4).all()


@pytest.mark.parametrize("in_place", [True, False])
def test_a_rope_is_fed_what_another_implementation_left_in_another_layout(
    use: Any, in_place: bool
) -> None:
    def rotary_embedding(query: Any, key: Any, *_: Any) -> Any:
        if in_place:
            return query.add_(1), key.add_(2)
        return (query + 1).transpose(0, 1).contiguous().transpose(0, 1), key + 2

    impl = acme("rotary_embedding", rotary_embedding, consumes={"query", "key"})
    plan = planning(use(impl), "eager")
    rope = built(plan, RotaryEmbedding, 8, 8, 32, 10000, True, torch.float32)
    query, key = torch.zeros(16, 3).T, torch.zeros(3, 16)
    got = rope(torch.arange(3), query, key)
    assert got[0].eq(1).all() and got[1].eq(2).all()
    assert got[0].shape == query.shape and got[0].view(3, 2, 8).eq(1).all()
