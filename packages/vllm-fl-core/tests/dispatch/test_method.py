"""`dispatch_method`: when it resolves, what a layer stores, and the effect of the engine's plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from builders import X, managing, norm, planning, refusing, silu

import vllm_fl.dispatch
from vllm_fl.dispatch import dispatch_method
from vllm_fl.dispatch.context import building
from vllm_fl.dispatch.manager import OpManager
from vllm_fl.dispatch.resolver import FOREIGN
from vllm_fl.settings.policy import SelectionPolicy


class Stock:
    """A layer class that, as in vLLM, reads the method once and stores it."""

    def __init__(self) -> None:
        self.forward = self.forward_oot

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0 - 1


class Silu(Stock):
    forward_oot = dispatch_method("silu_and_mul")


class Norm:
    weight = torch.ones(8)
    variance_epsilon = 1e-6
    forward = dispatch_method("rms_norm", grants=("residual",))


def use(monkeypatch: pytest.MonkeyPatch, manager: OpManager) -> OpManager:
    monkeypatch.setattr(vllm_fl.dispatch.manager, "manager", manager)
    return manager


def test_it_resolves_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = use(monkeypatch, managing(silu("vendor.acme", 1), silu("default.flagos", 2)))
    layer = Silu()
    assert layer.forward(X)[0, 0] == 3
    manager.set_policy(SelectionPolicy(prefer="vendor"))
    assert layer.forward(X)[0, 0] == 3
    assert Silu().forward(X)[0, 0] == 2


def test_the_grants_of_an_iterator_are_for_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = type("Layer", (Norm,), {"forward": dispatch_method("rms_norm", iter(("residual",)))})
    given, consumes = X.clone(), frozenset({"residual"})
    vendor = norm("vendor.acme", lambda x, residual: (x, residual), consumes=consumes)
    use(monkeypatch, managing(vendor))
    assert all(made.forward(X, given)[1] is given for made in (layer(), layer()))


class TestInsideAnEngine:
    def test_a_layer_keeps_the_plan_that_it_was_built_under(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use(monkeypatch, managing(silu("reference.torch", 5)))
        planned = planning(managing(silu("vendor.acme", 1)), "eager")
        with building(planned):
            layer = Silu()
        assert layer.forward(X)[0, 0] == 2
        assert layer.forward_oot(X)[0, 0] == 2, "read again after the model was built"
        assert Silu().forward(X)[0, 0] == 6, "a layer of its own, outside the engine"

    def test_an_op_that_the_plan_leaves_to_vllm_is_the_base_classs_own(self) -> None:
        manager = managing(silu("vendor.acme"), per_op_order={"silu_and_mul": ["stock", "vendor"]})
        with building(planning(manager, "eager")):
            layer = Silu()
        assert layer.forward.__func__ is Stock.forward_oot
        assert layer.forward(X)[0, 0] == -1

    def test_when_all_refuse_vllms_own_form_is_the_last(self) -> None:
        class Layer(Stock):
            forward_oot = dispatch_method("silu_and_mul", last=silu("reference.stock", 9))

        plan = planning(managing(refusing("vendor.acme", "no")), "eager")
        with building(plan):
            layer = Layer()
        assert layer.forward(X)[0, 0] == 10
        assert plan.fallbacks == {("silu_and_mul", "reference.stock"): 1}

    @pytest.mark.parametrize("adapt", [None, lambda layer, bound: lambda x: bound(x) * 3])
    def test_another_plugins_own_method_is_the_last(self, adapt: Any) -> None:
        class Layer(Stock):
            forward_oot = dispatch_method(
                "silu_and_mul", adapt=adapt, last=silu("reference.stock", 9), vllms=object
            )

        plan = planning(managing(refusing("vendor.acme", "no")), "eager")
        with building(plan):
            layer = Layer()
        assert layer.forward(X)[0, 0] == -1, "with the arguments of the layer's own call"
        assert plan.fallbacks == {("silu_and_mul", FOREIGN.impl_id): 1}

    def test_what_stands_in_for_a_layer(self) -> None:
        class StandIn:
            variance_epsilon = 1e-6

            def __init__(self, layer: Any) -> None:
                self.weight = layer.weight + 1

        class Layer(Norm):
            forward = dispatch_method("rms_norm", stand_in=StandIn)

        def rms_norm(obj: Any, x: torch.Tensor, residual: Any = None) -> torch.Tensor:
            return x * obj.weight

        vendor = norm("vendor.acme", lambda x, residual: x)
        impl = dataclasses.replace(vendor, fn=rms_norm, supports=None)
        with building(planning(managing(impl), "eager")):
            assert Layer().forward(X).eq(2).all()
            assert Norm().forward(X).eq(1).all()

    def test_a_method_that_compiled_code_has_of_its_own(self) -> None:
        class Layer(Stock):
            forward_oot = dispatch_method("silu_and_mul", traces_own=True)

        with building(planning(managing(silu("vendor.acme", 1)), "compiled")):
            layer = Layer()
        assert layer.forward(X)[0, 0] == 2
        torch._dynamo.reset()
        compiled = torch.compile(layer.forward, fullgraph=True, backend="eager")
        assert compiled(X)[0, 0] == -1
        with building(planning(managing(silu("vendor.acme", 1)), "eager")):
            layer = Layer()
        assert layer.forward(X)[0, 0] == 2
