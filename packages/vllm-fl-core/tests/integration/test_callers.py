"""Functions that only call an operator: their calls reach the override without torch's dispatcher.

The functions stand in modules that are made here; that vLLM's own are such functions is asked of
the vLLM that is installed.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

import torch
from builders import half, managing, planning, silu, silu_kernel, silu_of_kernel
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_fl.contracts.binding import Binding, OperatorPlace
from vllm_fl.engine.plan import Plan
from vllm_fl.integration.places import places as places_of
from vllm_fl.integration.seams import operators
from vllm_fl.integration.seams.callers import only_calls
from vllm_fl.integration.seams.lookups import target_of
from vllm_fl.integration.serving import calling
from vllm_fl.plugins.loading import known_contracts

CPU = torch.device("cpu")
X = torch.arange(32.0).reshape(4, 8)
STOCK, FIRST = X[..., 4:], half(X)

OPERATOR = "fl_test_callers::gated"
LIBRARY = torch.library.Library("fl_test_callers", "DEF")
LIBRARY.define("gated(Tensor(a!) out, Tensor input) -> ()")


def _own(out: Tensor, input: Tensor) -> None:
    out.copy_(input[..., input.shape[-1] // 2 :])


LIBRARY.impl("gated", _own, "CPU")
LIBRARY.impl("gated", lambda out, input: None, "Meta")


def gated(out: Tensor, input: Tensor) -> None:
    """What vLLM has: nothing but the call."""
    torch.ops.fl_test_callers.gated(out, input)


def _named(function: Callable[..., Any], name: str) -> str:
    """A module of this name that holds the function, loaded; where it is looked up."""
    module = ModuleType(name)
    module.gated = function  # type: ignore[attr-defined]
    sys.modules[name] = module
    return f"{name}.gated"


@pytest.fixture
def two_modules() -> Iterator[tuple[str, ...]]:
    """Where the function is looked up: one that defines it, one that imports it, one not loaded."""
    names = ("fl_callers_first", "fl_callers_second", "fl_callers_third")
    yield (*(_named(gated, name) for name in names[:2]), "fl_callers_third.gated")
    for name in names:
        sys.modules.pop(name, None)


@contextmanager
def serving(plan: Plan, callers: tuple[str, ...]) -> Iterator[Callable[[], dict[str, Any]]]:
    place = OperatorPlace(
        OPERATOR, ("out", "input"), silu_kernel, silu_of_kernel, tokens="input", callers=callers
    )
    chosen = operators.choose(plan, {"silu_and_mul": Binding((place,))}, CPU, torch.float32)
    operators.take(plan, chosen, CPU)
    try:
        with calling(plan):
            yield lambda: operators.report(plan, chosen)["silu_and_mul"][OPERATOR]
    finally:
        operators.remove(plan)


def plan_of(*impls: Any) -> Plan:
    return planning(managing(*impls))


def call(path: str, x: Tensor = X, **named: Any) -> Tensor:
    out = x.new_full((*x.shape[:-1], x.shape[-1] // 2), -1.0)
    target_of(path).function(out, **named) if named else target_of(path).function(out, x)
    return out


@contextmanager
def no_dispatcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whoever goes by torch's dispatcher fails."""
    with monkeypatch.context() as patch:
        patch.setattr(
            torch.ops.fl_test_callers, "gated", lambda *args: pytest.fail("by the dispatcher")
        )
        yield


def test_its_calls_are_answered_without_the_dispatcher(
    two_modules: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(plan_of(silu("vendor.a", 10.0)), two_modules) as told:
        assert told()["callers"] == 2
        with no_dispatcher(monkeypatch):
            for path in two_modules[:2]:
                assert torch.equal(call(path), FIRST + 10)
                assert torch.equal(call(path, input=X), FIRST + 10)
        out = torch.full((4, 4), -1.0)
        torch.ops.fl_test_callers.gated(out, X)
        assert torch.equal(out, FIRST + 10)
    assert all(target_of(path).function is gated for path in two_modules[:2])
    assert torch.equal(call(two_modules[0]), STOCK)


def test_what_is_left_to_vllm_gets_its_kernel_as_directly(
    two_modules: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(silu("vendor.a", 10.0))
    with serving(plan, two_modules) as told:
        with calling(None), no_dispatcher(monkeypatch):
            assert torch.equal(call(two_modules[0]), STOCK)
        assert told()["without_engine"] == 1
        function = target_of(two_modules[0]).function
        with pytest.raises(TypeError, match="missing 1 required"):
            function(X)
        with pytest.raises(TypeError, match="unexpected keyword"):
            function(X, x=X)
        with pytest.raises(TypeError, match="multiple values"):
            function(X, X, input=X)
        with pytest.raises(TypeError, match="takes 2 positional"):
            function(X, X, X)


def test_who_must_see_the_call_sees_it(two_modules: tuple[str, ...]) -> None:
    path = two_modules[0]
    with serving(plan_of(silu("vendor.a", 10.0)), two_modules):
        with torch.profiler.profile() as profile:
            assert torch.equal(call(path), FIRST + 10)
        assert any(event.name == OPERATOR for event in profile.events())
        with FakeTensorMode() as mode:
            assert call(path, mode.from_tensor(X)).shape == (4, 4)
        assert call(path, X.to("meta")).device.type == "meta"
        function, out = target_of(path).function, torch.full((4, 4), -1.0)
        torch.compile(lambda out, x: function(out, x), backend="eager", fullgraph=True)(out, X)
        assert torch.equal(out, FIRST + 10)


def test_what_imported_it_meanwhile_has_vllms_own_at_the_end(two_modules: tuple[str, ...]) -> None:
    with serving(plan_of(silu("vendor.a", 10.0)), two_modules) as told:
        ours = target_of(two_modules[0]).function
        assert _named(ours, "fl_callers_third") == two_modules[2]
        assert torch.equal(call(two_modules[2]), FIRST + 10)
        assert told()["callers"] == 3
    assert target_of(two_modules[2]).function is gated
    out = torch.full((4, 4), -1.0)
    ours(out, X)  # somebody held it
    assert torch.equal(out, STOCK)


def _sevens(out: Tensor, input: Tensor) -> None:
    out.fill_(7.0)


def test_a_later_override_gets_these_calls_too(two_modules: tuple[str, ...]) -> None:
    plan = plan_of(silu("vendor.a", 10.0))
    with serving(plan, two_modules) as told:
        library = torch.library.Library("fl_test_callers", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library.impl("gated", _sevens, "CPU", allow_override=True)
        try:
            assert list(operators.overriders(plan)) == [OPERATOR]
            assert torch.equal(call(two_modules[1]), torch.full((4, 4), 7.0))
            assert told()["callers"] == 0
        finally:
            library._destroy()


def _more(out: Tensor, input: Tensor) -> None:
    input = input + 1
    torch.ops.fl_test_callers.gated(out, input)


def _other_order(out: Tensor, input: Tensor) -> None:
    torch.ops.fl_test_callers.gated(input, out)


def _with_default(out: Tensor, input: Tensor = X) -> None:
    torch.ops.fl_test_callers.gated(out, input)


def _returning(out: Tensor, input: Tensor) -> None:
    return torch.ops.fl_test_callers.gated(out, input)  # type: ignore[no-any-return]


@torch.inference_mode()
def _decorated(out: Tensor, input: Tensor) -> None:
    torch.ops.fl_test_callers.gated(out, input)


@pytest.mark.parametrize(
    "function", [_more, _other_order, _with_default, _decorated, len, eval("lambda out, input: 0")]
)
def test_a_function_that_does_anything_else_is_left(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert only_calls(gated, OPERATOR, ("out", "input"))
    assert only_calls(_returning, OPERATOR, ("out", "input"))
    assert not only_calls(function, OPERATOR, ("out", "input"))
    path = _named(function, "fl_callers_other")
    monkeypatch.setitem(sys.modules, "fl_callers_other", sys.modules["fl_callers_other"])
    with serving(plan_of(silu("vendor.a", 10.0)), (path,)) as told:
        assert told()["callers"] == 0
        assert target_of(path).function is function


@pytest.mark.parametrize(
    "place",
    [place for _, place in places_of(known_contracts().bindings, OperatorPlace) if place.callers],
)
def test_vllms_own_functions_only_call_their_operators(place: OperatorPlace) -> None:
    function = target_of(place.callers[0]).function
    assert only_calls(function, place.name, place.parameters)
    assert not only_calls(function, place.name, (*place.parameters, "another"))
