"""The function patcher: Python functions of vLLM that an engine's plan replaces."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from builders import engine_of, half, plan_of, silu, taking
from torch import Tensor

from vllm_fl.contracts.binding import Binding, FunctionTarget
from vllm_fl.engine.plan import Plan
from vllm_fl.integration.patchers.functions import Functions
from vllm_fl.integration.patchers.process_wide import Choice

PATCHER = Functions()

X = torch.arange(32.0).reshape(4, 8)
STOCK, FIRST = X[..., 4:], half(X)


def _route(op: Callable[..., Tensor]) -> Callable[..., Any]:
    def gated(input: Tensor, quantised: bool) -> Any:
        return NotImplemented if quantised else op(input)

    return gated


def _native(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def silu_and_mul(x: Tensor) -> Tensor:
        return own(x, False)

    return silu_and_mul


TARGET = FunctionTarget(
    ("fl_home.gated", "fl_caller.gated", "fl_gone.gated"), ("input", "quantised"), _route, _native
)
METHOD = FunctionTarget(
    ("fl_home.Layer.apply",),
    ("self", "input"),
    lambda op: lambda self, input: op(input),
    lambda own: lambda x: own(None, x),
)
STATIC = FunctionTarget(
    ("fl_home.Layer.plain",), ("input",), lambda op: op, lambda own: lambda x: own(x)
)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for a vLLM module, and a module that imports its function by name."""
    module, caller = ModuleType("fl_home"), ModuleType("fl_caller")

    def gated(input: Tensor, quantised: bool = False, scale: float = 1.0) -> Tensor:
        return input[..., 4:] * scale

    class Layer:
        def apply(self, input: Tensor) -> Tensor:
            return input[..., 4:]

        @staticmethod
        def plain(input: Tensor) -> Tensor:
            return input[..., 4:]

    class Heir(Layer):
        pass

    vars(module).update(gated=gated, Layer=Layer, Heir=Heir)
    vars(caller).update(gated=gated)
    monkeypatch.setitem(sys.modules, "fl_home", module)
    monkeypatch.setitem(sys.modules, "fl_caller", caller)
    return module


def binding(*targets: FunctionTarget) -> dict[str, Binding]:
    return {"silu_and_mul": Binding(targets or (TARGET,))}


def engine(plan: Plan, bound: dict[str, Binding] | None = None) -> AbstractContextManager[Choice]:
    return taking(plan, bound or binding(), PATCHER)


def reported(plan: Plan, chosen: Choice) -> dict[str, Any]:
    report = PATCHER.report_targets(engine_of(plan), chosen)
    json.dumps(report)
    return report["silu_and_mul"]


def test_calls_reach_the_plan_wherever_the_function_is_looked_up(home: ModuleType) -> None:
    before = home.gated
    plan = plan_of(silu("vendor.a", 10.0))
    with engine(plan) as chosen:
        for module in ("fl_home", "fl_caller"):
            gated = sys.modules[module].gated
            assert torch.equal(gated(X), FIRST + 10)
            assert torch.equal(gated(input=X, quantised=False), FIRST + 10)
        assert reported(plan, chosen)["fl_home.gated"]["places"] == 2
        assert chosen.names == {"silu_and_mul": ["fl_home.gated"]}
    assert home.gated is before and sys.modules["fl_caller"].gated is before


def test_methods_and_static_methods(home: ModuleType) -> None:
    before = dict(vars(home.Layer))
    with engine(plan_of(silu("vendor.a")), binding(METHOD, STATIC)):
        assert torch.equal(home.Layer().apply(X), FIRST)
        assert torch.equal(home.Heir().apply(X), FIRST)
        assert torch.equal(home.Layer.plain(X), FIRST)
        assert torch.equal(home.Layer().plain(X), FIRST)
    assert {k: vars(home.Layer)[k] for k in before} == before


@pytest.mark.parametrize(
    ("args", "named", "factor"),
    [((X, True), {}, 1.0), ((X,), {"quantised": True}, 1.0), ((X, False, 3.0), {}, 3.0)],
    ids=["another op", "another op by name", "a parameter that the binding does not know"],
)
def test_what_is_not_the_op_is_vllms_and_counted(
    args: tuple[Any, ...], named: dict[str, Any], factor: float
) -> None:
    plan = plan_of(silu("vendor.a"))
    with engine(plan) as chosen:
        assert torch.equal(sys.modules["fl_home"].gated(*args, **named), STOCK * factor)
        assert reported(plan, chosen)["fl_home.gated"]["other_arguments"] == 1


def test_a_call_of_a_size_that_is_left_to_vllm_is_converted_if_tokens_are_unknown(
    home: ModuleType,
) -> None:
    plan = plan_of(silu("vendor.a"), order={"<=2": "stock", "rest": "vendor"})
    for tokens, added in (("", 1), ("input", 0)):  # 0: vLLM's function gets the call as it came
        target = replace(TARGET, tokens=tokens, native=lambda own: lambda x: own(x, False) + 1)
        with engine(plan, binding(target)):
            assert torch.equal(home.gated(X[:2]), STOCK[:2] + added)
            assert torch.equal(home.gated(input=X[:2]), STOCK[:2] + added)
            assert torch.equal(home.gated(X), FIRST)


def test_a_compiler_traces_vllms_own_function(home: ModuleType) -> None:
    with engine(plan_of(silu("vendor.a"))):
        compiled = torch.compile(lambda x: home.gated(x) * 2, backend="eager", fullgraph=True)
        assert torch.equal(compiled(X), STOCK * 2)
        assert torch.equal(home.gated(X), FIRST)


@pytest.mark.parametrize(
    ("paths", "parameters", "why"),
    [
        (("fl_home.absent",), ("input",), "has no such function"),
        (("fl_nowhere.gated",), ("input",), "No module named 'fl_nowhere'"),
        (("fl_home.gated",), ("x", "quantised"), "its parameters are input, quantised, scale"),
        (("fl_home.Layer.apply",), (), "without default: self, input"),
        (("fl_home.Heir.apply",), ("self", "input"), "Heir does not define apply"),
    ],
)
def test_a_function_that_does_not_fit_is_left_and_says_why(
    home: ModuleType, paths: tuple[str, ...], parameters: tuple[str, ...], why: str
) -> None:
    plan = plan_of(silu("vendor.a"))
    with engine(plan, binding(FunctionTarget(paths, parameters, _route, _native))) as chosen:
        assert chosen.names == {}
        assert why in reported(plan, chosen)[paths[0]]["left"]


def test_what_somebody_else_replaced_is_left_to_him(
    home: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    others = sys.modules["fl_caller"].gated = lambda *args: "theirs"  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING), engine(plan_of(silu("vendor.a"))):
        assert sys.modules["fl_caller"].gated is others
        assert torch.equal(home.gated(X), FIRST)
    assert "fl_caller.gated" in caplog.text


def test_what_somebody_put_in_our_place_stays_there_and_is_reported(home: ModuleType) -> None:
    plan = plan_of(silu("vendor.a"))
    with engine(plan) as chosen:
        ours = home.gated
        home.gated = wrapper = lambda *args: ours(*args)  # type: ignore[attr-defined]
        assert reported(plan, chosen)["fl_home.gated"]["replaced_after_us"] == "fl_home.gated"
    assert home.gated is wrapper
    assert torch.equal(home.gated(X), STOCK)
