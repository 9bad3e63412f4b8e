"""Guards: the contract's signature around an implementation, and the chain's fallback."""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

import pytest
import torch
from builders import X, failing, norm, silu

from vllm_fl.dispatch.chain import Chain
from vllm_fl.dispatch.guard import call_guard, method_guard
from vllm_fl.dispatch.manager import OpManager
from vllm_fl.dispatch.record import Record
from vllm_fl.errors import AllFailedError
from vllm_fl.logs import get_logger
from vllm_fl.plugins.registry import OpRegistry, known_contracts
from vllm_fl.plugins.types import BackendImplKind, OpImpl

OP = "silu_and_mul"


def record() -> Record:
    return Record(get_logger("dispatch"))


def chain(*impls: OpImpl, **fields: Any) -> Chain:
    op = impls[0].op_name
    fields = {"strict": False, "record": record(), **fields}
    return Chain(op, ((None, impls),), known_contracts().contracts[op], **fields)


@pytest.mark.parametrize("op", ["silu_and_mul", "rms_norm", "fused_experts", "moe_topk"])
def test_a_call_guard_has_the_contracts_signature_and_docstring(op: str) -> None:
    oracle = known_contracts().contracts[op].oracle
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


@pytest.mark.parametrize(("bare", "error"), [(True, ValueError()), (False, KeyboardInterrupt())])
def test_what_a_guard_does_not_catch(bare: bool, error: BaseException) -> None:
    impls = failing("vendor.acme", error), silu("reference.torch")
    with pytest.raises(type(error)) as caught:
        method_guard(chain(*impls, bare=bare))(object(), X)
    assert caught.value is error


@pytest.mark.parametrize("place", [0, 1])
def test_one_that_is_demoted_meanwhile_is_passed_over(place: int) -> None:
    notes = record()
    impls = [silu("default.flagos", 1), silu("vendor.acme", 2), silu("reference.torch", 3)]
    guard = call_guard(chain(*impls, record=notes))
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
    notes = record()
    guard = call_guard(chain(*impls, record=notes))
    notes.demote(OP, "default.flagos", "failed earlier")
    late = call_guard(chain(*impls, record=notes))  # compiled after the demotion
    assert guard(X).eq(3).all() and late(X).eq(3).all() and asked == []
    notes.end_demotions()
    assert guard(X).eq(2).all() and late(X).eq(2).all() and asked == ["asked"] * 2


def test_when_all_are_demoted_meanwhile_each_cause_is_said() -> None:
    notes = record()
    guard = call_guard(chain(silu("default.flagos"), silu("vendor.acme"), record=notes))
    notes.demote(OP, "default.flagos", "broke on Monday")
    notes.demote(OP, "vendor.acme", "broke on Tuesday")
    with pytest.raises(AllFailedError, match="broke on Monday") as caught:
        guard(X)
    assert caught.value.causes == (
        ("default.flagos", "broke on Monday"),
        ("vendor.acme", "broke on Tuesday"),
    )


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
    guard(X, None, None, 1e-6)  # the results have no residual to overwrite
    assert seen["x"] is X


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
