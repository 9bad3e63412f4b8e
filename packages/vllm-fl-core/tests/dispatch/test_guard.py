"""Guards: the contract's own signature around an implementation, and what a chain does after it."""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

import pytest
import torch
from builders import X, failing, norm, refusing, silu

from vllm_fl.contracts import contracts
from vllm_fl.dispatch.chain import Chain
from vllm_fl.dispatch.guard import call_guard, method_guard
from vllm_fl.dispatch.manager import OpManager
from vllm_fl.dispatch.record import Record
from vllm_fl.errors import AllFailedError
from vllm_fl.logs import get_logger
from vllm_fl.plugins.registry import OpRegistry
from vllm_fl.plugins.types import BackendImplKind, OpImpl

OP = "silu_and_mul"


class Notes(Record):
    """What a chain reports, kept; demotion as told."""

    def __init__(self, *, demotes: bool = True) -> None:
        super().__init__(get_logger("dispatch"))
        self.demotes = demotes
        self.refusals: list[tuple[str, str]] = []
        self.taken_over: list[tuple[str, str]] = []
        self.lasts: list[bool] = []

    def refused(self, op: str, impl: OpImpl, reason: str) -> None:
        self.refusals.append((impl.impl_id, reason))

    def failed(self, op: str, impl: OpImpl, error: Exception, *, last: bool) -> bool:
        self.lasts.append(last)
        if self.demotes:
            self.demote(op, impl.impl_id, str(error))
        return self.demotes

    def fell_back(self, op: str, first: OpImpl, impl: OpImpl) -> None:
        self.taken_over.append((first.impl_id, impl.impl_id))


def chain(*impls: OpImpl, notes: Notes | None = None, **fields: Any) -> Chain:
    op = impls[0].op_name
    fields = {"strict": False, "record": notes or Notes(), **fields}
    return Chain(op, ((None, impls),), contracts()[op], **fields)


@pytest.mark.parametrize("op", ["silu_and_mul", "rms_norm", "fused_experts", "moe_topk"])
def test_a_call_guard_has_the_contracts_signature_and_docstring(op: str) -> None:
    oracle = contracts()[op].oracle
    guard = call_guard(chain(OpImpl(op, "reference.torch", BackendImplKind.REFERENCE, oracle)))
    wanted = inspect.signature(oracle)
    assert [(p.name, p.default) for p in inspect.signature(guard).parameters.values()] == [
        (p.name, p.default) for p in wanted.parameters.values()
    ]
    assert guard.__doc__ == oracle.__doc__
    assert guard.__name__ == op


def test_a_method_guard_leaves_out_what_the_layer_provides_and_reads_it_at_each_call() -> None:
    class Layer:
        weight = torch.tensor([1.0, 2.0])
        variance_epsilon = 0.5
        has_weight = True

    seen = []

    def rms_norm(
        x: Any, residual: Any, weight: Any, epsilon: Any, variance_size: Any = None
    ) -> Any:
        seen.append((weight, epsilon, variance_size))
        return x

    layer = Layer()
    impl = OpImpl("rms_norm", "reference.torch", BackendImplKind.REFERENCE, rms_norm)
    guard = MethodType(method_guard(chain(impl)), layer)
    assert str(inspect.signature(guard)) == "(x, residual=None)"
    guard(X)
    layer.weight, layer.variance_epsilon = torch.tensor([3.0]), 0.25
    guard(X, None)
    layer.has_weight = False
    guard(X)
    assert [(None if w is None else w.tolist(), *rest) for w, *rest in seen] == [
        ([1.0, 2.0], 0.5, None),
        ([3.0], 0.25, None),
        (None, 0.25, None),
    ]


def test_a_bare_guard_catches_nothing() -> None:
    boom = ValueError("boom")
    guard = method_guard(chain(failing("vendor.acme", boom), silu("reference.torch"), bare=True))
    with pytest.raises(ValueError) as caught:
        guard(object(), X)
    assert caught.value is boom


def test_what_is_reported() -> None:
    notes = Notes()
    guard = call_guard(
        chain(
            refusing("default.flagos", "needs bf16"),
            failing("vendor.acme", ValueError("boom")),
            failing("vendor.beta", NotImplementedError("no fp32")),
            silu("reference.torch"),
            notes=notes,
        )
    )
    guard(X)
    assert notes.refusals == [
        ("default.flagos", "needs bf16"),
        ("vendor.beta", "NotImplementedError: no fp32"),
    ]
    assert notes.demoted(OP) == {"vendor.acme": "boom"}
    assert notes.lasts == [False]
    assert notes.taken_over == [("default.flagos", "reference.torch")]


@pytest.mark.parametrize("place", [0, 1])
def test_one_that_is_demoted_meanwhile_is_passed_over(place: int) -> None:
    notes = Notes()
    impls = [silu("default.flagos", 1), silu("vendor.acme", 2), silu("reference.torch", 3)]
    guard = call_guard(chain(*impls, notes=notes))
    notes.demote(OP, impls[place].impl_id, "failed earlier")
    assert guard(X)[0, 0] == (3 if place == 0 else 2)
    notes.end_demotions()
    assert guard(X)[0, 0] == 2


def test_a_guard_with_supports_is_passed_over_unasked_and_taken_back() -> None:
    asked: list[str] = []

    def supports(x: Any) -> bool:
        asked.append("asked")
        return True

    impls = (silu("default.flagos", 1.0, supports=supports), silu("vendor.acme", 2.0))
    notes = Notes()
    guard = call_guard(chain(*impls, notes=notes))
    notes.demote(OP, "default.flagos", "failed earlier")
    late = call_guard(chain(*impls, notes=notes))  # compiled when it was out already
    assert guard(X).eq(3).all() and late(X).eq(3).all() and asked == []
    notes.end_demotions()
    assert guard(X).eq(2).all() and late(X).eq(2).all() and asked == ["asked"] * 2


def test_when_all_are_demoted_meanwhile_each_cause_is_said() -> None:
    notes = Notes()
    guard = call_guard(chain(silu("default.flagos"), silu("vendor.acme"), notes=notes))
    notes.demote(OP, "default.flagos", "broke on Monday")
    notes.demote(OP, "vendor.acme", "broke on Tuesday")
    with pytest.raises(AllFailedError, match="broke on Monday") as caught:
        guard(X)
    assert caught.value.causes == (
        ("default.flagos", "broke on Monday"),
        ("vendor.acme", "broke on Tuesday"),
    )


def test_supports_that_breaks_is_a_failure_of_the_implementation() -> None:
    def supports(x: torch.Tensor) -> bool:
        raise ValueError("boom")

    notes = Notes()
    impls = (silu("vendor.acme", supports=supports), silu("reference.torch", 1))
    assert call_guard(chain(*impls, notes=notes))(X)[0, 0] == 2
    assert notes.demoted(OP) == {"vendor.acme": "boom"}


@pytest.mark.parametrize("grants", [(), ("x",), ("x", "residual")])
@pytest.mark.parametrize("place", [0, 1])
def test_only_what_is_granted_is_handed_over_uncopied(grants: tuple[str, ...], place: int) -> None:
    seen = {}

    def keep(x: Any, residual: Any) -> Any:
        seen.update(x=x, residual=residual)
        return x, residual

    impls = [norm("vendor.acme", keep, consumes={"x", "residual"})]
    if place:
        impls.insert(0, norm("default.flagos", keep, verdict=lambda: "no"))
    guard = call_guard(chain(*impls, grants=frozenset(grants)))
    given = {"x": torch.ones(2, 4), "residual": torch.ones(2, 4)}
    guard(**given, weight=None, epsilon=1e-6)
    for name, tensor in given.items():
        assert (seen[name] is tensor) == (name in grants)
        assert torch.equal(seen[name], tensor)


@pytest.mark.parametrize("place", [0, 1])
def test_without_a_place_for_results_nothing_is_given_up_and_nothing_copied(place: int) -> None:
    seen = []
    impls = [norm("vendor.acme", lambda x, residual: seen.append(x), consumes={"x", "residual"})]
    if place:
        impls.insert(0, norm("default.flagos", lambda x, residual: x, verdict=lambda: "no"))
    call_guard(chain(*impls))(X, None, None, 1e-6)
    assert len(seen) == 1 and seen[0] is X


def test_interrupts_pass_through_untouched() -> None:
    notes = Notes()
    guard = call_guard(
        chain(failing("vendor.acme", KeyboardInterrupt()), silu("reference.torch"), notes=notes)
    )
    with pytest.raises(KeyboardInterrupt):
        guard(X)
    assert notes.demoted(OP) == {}


def given_verdict(x: int, _verdict: int = 1, _fn: int = 2) -> tuple[int, int, int]:
    return x, _verdict, _fn


@pytest.mark.parametrize("op", ["_fn", "_guard", "print", "ﬁ_op"])
def test_names_that_generated_code_uses_itself_mean_what_the_plugin_meant(op: str) -> None:
    registry = OpRegistry()
    kind = BackendImplKind.VENDOR
    for name, supports in ((op, None), (f"{op}_2", lambda x, _verdict=1, _fn=2: True)):
        registry.register_impl(
            OpImpl(name, "vendor.acme", kind, given_verdict, "acme", supports=supports)
        )
        manager = OpManager(registry)
        assert manager.call(name, 5) == (5, 1, 2)
        assert manager.call(name, 5, 6, _fn=7) == (5, 6, 7)
        assert manager.resolve(name)(5, _verdict=6) == (5, 6, 2)
        assert manager.resolve(name).__name__ == name
