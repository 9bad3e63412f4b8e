"""Opaque operators: torch's checks, whole-graph compilation, and the chain inside."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from builders import X, failing, half, managing, norm, planning, refusing, silu

from vllm_fl.contracts import OpSpec, Sample
from vllm_fl.engine.opaque import opaque_op, unique_name
from vllm_fl.engine.plan import Plan, release_number, take_number
from vllm_fl.errors import CallError
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.types import BackendImplKind, OpImpl

CPU = torch.device("cpu")


def honest(spec: OpSpec) -> OpImpl:
    """The contract's oracle, with results in the contract's dtypes: correct by definition."""

    def exact(*args: Any) -> Any:
        return as_in(spec.fake(*args), spec.oracle(*args))

    exact.__signature__ = spec.signature  # type: ignore[attr-defined]
    return OpImpl(spec.name, "vendor.honest", BackendImplKind.VENDOR, exact, "honest")


def as_in(like: Any, result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(map(as_in, like, result))
    return None if result is None else result.to(like.dtype).contiguous()


def planned(*impls: OpImpl, **policy: Any) -> Plan:
    orders = {op: ["flagos", "vendor", "reference"] for op in known_contracts().contracts}
    return planning(managing(*impls, **{"per_op_order": orders, **policy}), "compiled")


def opaque(*impls: OpImpl, **policy: Any) -> Any:
    plan = planned(*impls, **policy)
    return opaque_op(plan.chain(impls[0].op_name)).fn


def kinds(spec: OpSpec) -> list[Sample]:
    """One sample for each set of omitted arguments, and so for each variant."""
    found: dict[Any, Sample] = {}
    for sample in spec.samples(getattr(torch, spec.dtypes[0]), CPU):
        found.setdefault(tuple(isinstance(a, torch.Tensor) for a in sample.args), sample)
    return list(found.values())


def each(ops: Callable[[OpSpec], Iterable[Sample]]) -> Any:
    samples = [
        pytest.param(spec, sample, id=f"{spec.name}: {sample.name}")
        for spec in known_contracts().contracts.values()
        for sample in ops(spec)
    ]
    return pytest.mark.parametrize(("spec", "sample"), samples)


def overload(spec: OpSpec, impl: Any, sample: Sample) -> tuple[Any, tuple[Any, ...]]:
    """The torch.library operator, and its arguments, of a call with this sample's arguments."""
    seen: list[tuple[Any, tuple[Any, ...]]] = []
    scope = impl.__globals__
    kept = {name: value for name, value in scope.items() if name.startswith("_op")}
    try:
        for name, operator in kept.items():
            scope[name] = lambda *args, operator=operator: seen.append((operator, args)) or args[0]
        impl(*sample.args)
    finally:
        scope.update(kept)
    return seen[0]


@each(kinds)
def test_opcheck(spec: OpSpec, sample: Sample) -> None:
    operator, args = overload(spec, opaque(honest(spec)), sample)
    # torch's clone of a tensor without elements fails for some strides.
    args = tuple(
        a.new_empty(a.shape) if isinstance(a, torch.Tensor) and not a.numel() else a for a in args
    )
    # test_schema detects writes with allclose, which does not support fp8.
    schema = [] if args[0].dtype == torch.float8_e4m3fn else ["test_schema"]
    utils = (*schema, "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(operator, args, test_utils=utils)


def flat(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def graph_of(fn: Any, *args: Any) -> tuple[Any, torch.fx.GraphModule]:
    """The result and the graph of `fn` when it is compiled."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, backend=backend)(*args), graphs[0]


@each(lambda spec: kinds(spec)[:1])
def test_a_compiler_takes_it_whole(spec: OpSpec, sample: Sample) -> None:
    got, traced = graph_of(opaque(honest(spec)), *sample.args)
    targets = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert [t for t in targets if t.startswith("vllm_fl.")] == targets[:1]
    want = honest(spec).fn(*sample.args)
    for one, other in zip(flat(got), flat(want), strict=True):
        if one is not None or other is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_a_failure_inside_is_raised_and_a_mistake_is_the_callers() -> None:
    with pytest.raises(ValueError, match="boom"):
        opaque(failing("vendor.acme", ValueError("boom")), silu("reference.torch"))(X)
    with pytest.raises(CallError) as caught:
        opaque(failing("vendor.mine", ValueError("boom")))(torch.ones(2, 7))
    assert caught.value.argument == "x"


BOTH = frozenset({"x", "residual"})


def adding(write: Any) -> OpImpl:
    """An rms_norm that returns (x + residual, x - residual) through `write`."""

    def both(x: Any, residual: Any) -> Any:
        return x * 2 if residual is None else write(x, residual, x + residual, x - residual)

    return norm("vendor.acme", both, consumes=BOTH)


def written(plan: Plan, grants: frozenset[str] = BOTH) -> Any:
    return opaque_op(plan.chain("rms_norm", grants)).fn


def in_both(x: Any, residual: Any, one: Any, other: Any) -> Any:
    return x.copy_(one), residual.copy_(other)


WRITES = {
    "in place": in_both,
    "views of both": lambda *a: tuple(part.view_as(part) for part in in_both(*a)),
    "fresh": lambda x, residual, one, other: (one, other),
    "fresh, over ruins": lambda x, residual, one, other: (
        (x.fill_(9), residual.fill_(9)) and (one, other)
    ),
    "crosswise": lambda x, residual, one, other: in_both(x, residual, other, one)[::-1],
    "both in one": lambda x, residual, one, other: (x.copy_(one), other),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_granted_arguments_hold_the_results(write: Any) -> None:
    fn = written(planned(adding(write)))
    x, residual = torch.randn(3, 4), torch.randn(3, 4)
    one, other = x + residual, x - residual
    got = fn(x, residual, None, 1e-6, None)
    assert got[0] is x and got[1] is residual
    assert torch.equal(x, one) and torch.equal(residual, other)
    kept = x.clone()
    assert torch.equal(fn(x, None, None, 1e-6, None), kept * 2) and torch.equal(x, kept)


@pytest.mark.parametrize("grants", [frozenset(), frozenset({"x"})])
def test_what_is_not_granted_stays(grants: frozenset[str]) -> None:
    x, residual = torch.ones(3, 4), torch.ones(3, 4)
    got = written(planned(adding(in_both)), grants)(x, residual, None, 1e-6, None)
    assert got[0].eq(2).all() and got[1].eq(0).all()
    assert x.eq(1).all() and residual.eq(1).all()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiler_makes_the_copies_that_are_needed_and_no_more(backend: str) -> None:
    fn = written(planned(adding(in_both)))

    def kept(x: torch.Tensor, residual: torch.Tensor) -> Any:
        doubled = x * 2
        first, second = fn(doubled, residual.clone(), None, 1e-6, None)
        return first + second, residual

    def strided(qkv: torch.Tensor) -> Any:
        q, k = qkv.split(4, dim=-1)
        first, second = fn(q, k, None, 1e-6, None)
        return first * 1, second * 1

    torch._dynamo.reset()
    x, residual = torch.randint(-8, 9, (2, 3, 4)).float()  # exact sums and differences
    got, untouched = torch.compile(kept, fullgraph=True, backend=backend)(x, residual)
    assert torch.equal(got, 4 * x) and torch.equal(untouched, residual)
    qkv = torch.randn(3, 8)
    one, other = (qkv[:, :4] + qkv[:, 4:]).clone(), (qkv[:, :4] - qkv[:, 4:]).clone()
    got = torch.compile(strided, fullgraph=True, backend=backend)(qkv)
    assert torch.equal(got[0], one) and torch.equal(got[1], other)


@pytest.mark.parametrize(
    "alias",
    [
        lambda x, r: (x, r),
        lambda x, r: (x.view_as(x), r[:]),
        lambda x, r: (r, r),
        lambda x, r: 2 * ((x + r),),
        lambda x, r: (base := torch.zeros(4, 4)) is None or (base[:2], base[2:]),
    ],
    ids=["itself", "a view", "the other", "one twice", "two views of one"],
)
def test_results_that_alias_are_copied(alias: Any) -> None:
    x, residual = torch.ones(2, 4), torch.ones(2, 4) * 2
    want = alias(x, residual)
    got = opaque(norm("vendor.alias", alias))(x, residual, None, 1e-6, None)
    pointers = {t.untyped_storage().data_ptr() for t in (*got, x, residual)}
    assert len(pointers) == 4
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_the_same_chain_is_the_same_operator_and_another_is_another() -> None:
    def operator(fn: Any) -> Any:
        return fn.__globals__["_op0"]

    first = opaque(silu("vendor.acme", 1), silu("reference.torch"))
    again = opaque(silu("vendor.acme", 1), silu("reference.torch"))
    assert operator(first) is operator(again)
    assert operator(opaque(silu("vendor.acme", 1))) is not operator(first)
    strict = opaque(silu("vendor.acme", 1), silu("reference.torch"), strict=True)
    assert operator(strict) is not operator(first)


def test_a_traceable_one_stays_open_to_the_compiler() -> None:
    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        return half(x).sin()

    bound = planned(silu("reference.torch", fn=silu_and_mul, traceable=True)).bind(
        "silu_and_mul", object(), frozenset()
    )
    _, traced = graph_of(bound, X)
    assert "sin" in traced.code and "vllm_fl" not in traced.code


FOLDED = [f"vendor.{name}" for name in ("a-b", "a_b", "a.b", "A-B", "é", "华为", "_")]
"""Ids that would have the same spelling in ASCII."""


def test_names_are_ascii_legible_and_never_folded() -> None:
    names = [unique_name(f"fl_{impl_id}") for impl_id in (*FOLDED, "vendor." + 200 * "x")]
    assert len(set(names)) == len(names)
    for name in names:
        assert name.isascii() and name.isidentifier() and name == name.lower()
        assert name.startswith("fl_vendor_") and len(name) < 120
    assert unique_name("a", ["b", "c"]) != unique_name("a", ["b|c"])
    assert unique_name("a", "b") == unique_name("a", "b"), "another process finds it"


def test_ids_that_would_join_to_one_are_two() -> None:
    def last(*impls: OpImpl) -> Any:
        return opaque(refusing("vendor.a", "no"), *impls)

    one = last(refusing("vendor.b", "no"), silu("vendor.c", 1))
    other = last(silu("vendor.b|vendor.c", 2))
    assert one(X)[0, 0] == 2 and other(X)[0, 0] == 3
    assert one(X)[0, 0] == 2


def test_two_plans_that_serve_at_once_have_each_their_own_operators() -> None:
    manager = managing(silu("vendor.acme", 1), silu("reference.torch"))

    def engine() -> tuple[Plan, Any]:
        plan = take_number(dataclasses.replace(planning(manager, "compiled"), counts_calls=True))
        bound = plan.bind("silu_and_mul", object(), frozenset())
        torch._dynamo.reset()
        return plan, torch.compile(bound, fullgraph=True, backend="aot_eager")

    (first, run_first), (second, run_second) = engine(), engine()
    try:
        run_first(X), run_second(X), run_first(X)
        assert (first.number, second.number) == (1, 2)
        assert first.calls == {("silu_and_mul", "vendor.acme"): 2}
        assert second.calls == {("silu_and_mul", "vendor.acme"): 1}
        release_number(first)
        third, run_third = engine()  # reuses the first one's operators, with its own counts
        assert third.number == 1
        run_third(X), run_second(X)
        assert third.calls == {("silu_and_mul", "vendor.acme"): 1}
        assert second.calls == {("silu_and_mul", "vendor.acme"): 2}
        assert first.calls == {("silu_and_mul", "vendor.acme"): 2}
    finally:
        for plan in (first, second, third):
            release_number(plan)


@pytest.mark.parametrize("consumes", [frozenset(), BOTH])
def test_a_result_of_another_layout_is_what_the_compiler_was_promised(
    consumes: frozenset[str],
) -> None:
    impl = dataclasses.replace(
        adding(lambda x, residual, one, other: (one.T.contiguous().T, other.T.contiguous().T)),
        consumes=consumes,
    )
    fn = written(planned(impl))
    x, residual = torch.randn(3, 4), torch.randn(3, 4)
    one, other = x + residual, x - residual
    got = fn(x.clone(), residual.clone(), None, 1e-6, None)
    assert all(part.is_contiguous() for part in got)
    assert torch.equal(got[0], one) and torch.equal(got[1], other)
