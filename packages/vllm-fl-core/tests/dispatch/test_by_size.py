"""Orders by size: the row of a call, and the rules of a chain in each row."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from builders import failing, managing, silu

from vllm_fl.contracts import OpSpec
from vllm_fl.dispatch.chain import Chain
from vllm_fl.dispatch.context import policy_context
from vllm_fl.dispatch.guard import call_guard, method_guard
from vllm_fl.dispatch.record import Record
from vllm_fl.errors import NoImplementationError, SettingsError
from vllm_fl.logs import get_logger
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.types import BackendImplKind, OpImpl
from vllm_fl.settings.policy import SelectionPolicy

OP = "silu_and_mul"
BY_SIZE = {"<=2": ["vendor", "reference"], "<=16": "reference", "rest": ["flagos", "reference"]}


def x(tokens: int) -> torch.Tensor:
    return torch.ones(tokens, 8)


def three(**vendors: Any) -> tuple[OpImpl, ...]:
    """First candidates of the rows; each adds another number."""
    return silu("vendor.acme", 1, **vendors), silu("reference.torch", 2), silu("default.flagos", 3)


def ran(manager: Any, tokens: int) -> int:
    return int(manager.call(OP, x(tokens)).sum() / (tokens * 4)) - 1


def saying(text: str, op: str = OP) -> OpImpl:
    return OpImpl(op, f"vendor.{text}", BackendImplKind.VENDOR, lambda *args: text, text)


def chain(op: str, rest: str, *rows: tuple[int, str]) -> Chain:
    by_size = tuple((n, (saying(text, op),)) for n, text in (*rows, (None, rest)))
    return Chain(
        op, by_size, known_contracts().contracts[op], False, Record(get_logger("dispatch"))
    )


@pytest.mark.parametrize(
    "spec", known_contracts().contracts.values(), ids=list(known_contracts().contracts)
)
def test_a_calls_size_is_that_of_the_first_argument_with_a_row_per_token(spec: OpSpec) -> None:
    """Also if the call omits optional arguments."""
    for sample in spec.samples(getattr(torch, spec.dtypes[0]), torch.device("cpu")):
        given = dict(zip(spec.parameters, sample.args, strict=True))
        tokens = next(len(a) for n, a in given.items() if n in spec.by_token and a is not None)
        assert call_guard(chain(spec.name, "rest", (max(1, tokens), "row")))(*sample.args) == "row"
        if tokens > 1:
            smaller = chain(spec.name, "rest", (tokens - 1, "row"))
            assert call_guard(smaller)(**given) == "rest"


@pytest.mark.parametrize("op", ["silu_and_mul", "rms_norm", "fused_experts"])
def test_the_signature_is_the_same_with_and_without_rows(op: str) -> None:
    for guard in (call_guard, method_guard):
        plain, by_size = guard(chain(op, "rest")), guard(chain(op, "rest", (8, "row")))
        assert inspect.signature(by_size) == inspect.signature(plain)
        assert (by_size.__doc__, by_size.__name__) == (plain.__doc__, op)


def test_a_layers_method_and_a_block_go_by_size_too() -> None:
    class Layer:
        pass

    manager = managing(*three(), per_op_order={OP: BY_SIZE})
    bound = manager.bind(OP, Layer())
    sizes = {1: 1, 2: 1, 3: 2, 16: 2, 17: 3, 4000: 3}
    assert {n: int(bound(x(n))[0, 0]) - 1 for n in sizes} == sizes
    assert manager.resolver().ceilings(OP) == (2, 16)
    other = SelectionPolicy(per_op_order={OP: {"<=9": "flagos", "rest": "vendor"}})  # type: ignore[dict-item]
    with policy_context(other):
        assert [ran(manager, n) for n in (9, 10)] == [3, 1]
    assert [ran(manager, n) for n in (2, 3, 17)] == [1, 2, 3]


def test_a_demotion_switches_every_row_that_begins_with_it() -> None:
    impls = failing("vendor.acme", ValueError("boom")), *three()[1:]
    order = {OP: {"<=2": ["vendor", "reference"], "<=4": ["vendor", "flagos"], "rest": "reference"}}
    manager = managing(*impls, per_op_order=order)
    held = manager.resolve(OP)
    assert int(held(x(1))[0, 0]) == 3
    assert set(manager.demotions) == {(OP, "vendor.acme")}
    assert [int(held(x(n))[0, 0]) - 1 for n in (1, 3, 5)] == [2, 3, 2]


def test_a_size_that_engines_leave_to_vllm_fails_in_a_script_and_others_do_not() -> None:
    order = {OP: {"<=2": "stock", "rest": "flagos"}}
    manager = managing(*three(), per_op_order=order)
    assert ran(manager, 3) == 3
    for _ in range(2):
        with pytest.raises(NoImplementationError, match="not listed: stock") as caught:
            ran(manager, 2)
        assert caught.value.op == OP and caught.value.rejected
    assert not manager.demotions
    with pytest.raises(NoImplementationError):
        managing(*three(), per_op_order={OP: {"<=2": "flagos", "rest": "stock"}}).resolve(OP)


def test_an_op_that_no_contract_names_has_no_sizes() -> None:
    impl = OpImpl("mine", "vendor.acme", BackendImplKind.VENDOR, lambda x: x, "acme")
    manager = managing(impl, per_op_order={"mine": {"<=2": "vendor", "rest": "vendor"}})
    with pytest.raises(SettingsError, match="an order by size needs a contract") as caught:
        manager.call("mine", 1)
    assert caught.value.key == "op_backends.mine"
