"""Declared routes: a target's arguments to the contract's, and vLLM's kernel to the op."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_fl import Binding, FunctionTarget, IrTarget, OperatorTarget, Route
from vllm_fl.plugins.registry import known_contracts

NORM = known_contracts().contracts["rms_norm"]
X, WEIGHT = torch.randn(3, 8), torch.ones(8)


def op(x: Any, residual: Any, weight: Any, epsilon: Any, variance_size: Any) -> Any:
    return x * 2 if residual is None else (x * 2, residual * 3)


def target(parameters: tuple[str, ...], route: Any, native: Any = None) -> Any:
    more = () if native is None else (native,)
    return (
        Binding((OperatorTarget("acme::norm", parameters, route, *more),)).routed(NORM).targets[0]
    )


def test_names_constants_and_a_tensor_of_the_callers() -> None:
    found = target(
        ("out", "input", "weight", "epsilon", "beta"),
        Route(args={"x": "input"}, constants={"residual": None, "beta": 1.0}, out="out"),
    )
    out, calls = torch.empty(3, 8), list[Any]()
    assert found.route(op)(out, X, WEIGHT, 1e-6, 1.0) is None and torch.equal(out, X * 2)
    assert found.route(op)(out, X, WEIGHT, 1e-6, 2.0) is NotImplemented
    result = found.native(lambda *args: calls.append(args))(X, None, WEIGHT, 1e-6)
    ((left, *rest),) = calls
    assert left is result and result.shape == X.shape and rest == [X, WEIGHT, 1e-6, 1.0]
    assert found.grants == ()


def test_what_the_place_overwrites_may_be_overwritten() -> None:
    names = ("input", "residual", "weight", "epsilon")
    found = target(names, Route(args={"x": "input"}, out=("input", "residual")))
    x, residual = X.clone(), torch.ones(3, 8)
    found.route(op)(x, residual, WEIGHT, 1e-6)
    assert torch.equal(x, X * 2) and bool((residual == 3).all())
    assert found.grants == ("x", "residual")
    assert found.native(lambda *args: None)(x, residual, WEIGHT, 1e-6) == (x, residual)


def test_what_is_computed_both_ways() -> None:
    route = Route(
        args={"x": lambda input: input.T, "epsilon": lambda shift: shift / 2},
        constants={"residual": None},
        only=lambda input: input.ndim == 2,
        results=lambda result, shift: result.T + shift,
        own_args={"input": lambda x: x.T, "shift": lambda epsilon: epsilon * 2},
        own_results=lambda result, epsilon: result.T - 2 * epsilon,
    )
    function = FunctionTarget(("acme.norm",), ("input", "weight", "shift"), route)
    found: Any = Binding((function,)).routed(NORM).targets[0]
    assert found.route(op)(X[None], WEIGHT, 1.0) is NotImplemented
    through = found.native(found.route(op))(X, None, WEIGHT, 0.5)
    torch.testing.assert_close(through, X * 2)


def test_an_op_of_the_ir_has_the_contracts_defaults() -> None:
    names = ("x", "weight", "epsilon", "variance_size")
    ir = IrTarget("norm", Route(constants={"residual": None}), parameters=names)
    found: Any = Binding((ir,)).routed(NORM).targets[0]
    assert found.route(lambda *args: args)(X, WEIGHT, 1e-6) == (X, None, WEIGHT, 1e-6, None)


def test_functions_of_a_binding_stay_as_they_are() -> None:
    written = OperatorTarget("acme::norm", ("x",), lambda op: op, lambda own: own)
    assert Binding((written,)).routed(NORM).targets == (written,)
    with pytest.raises(TypeError):  # only a binding knows the contract of a declared route
        OperatorTarget("acme::norm", ("x",), Route()).route(op)


@pytest.mark.parametrize(
    ("names", "route", "word"),
    [
        (("x",), Route(), "residual"),
        (("x", "residual", "weight", "epsilon"), Route(only=lambda y: True), "y"),
        (("x", "residual", "weight", "epsilon"), Route(args={"x": "input"}), "input"),
    ],
)
def test_a_route_that_does_not_fit_is_an_error(names: Any, route: Route, word: str) -> None:
    with pytest.raises(TypeError, match=repr(word)):
        target(names, route).route(op)
