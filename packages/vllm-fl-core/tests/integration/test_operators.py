"""The operator patcher: kernels of torch operators that an engine's plan overrides. Most tests
override operators of their own library; tests of the four ops override vLLM's operators."""

from __future__ import annotations

import json
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from builders import engine_of, half, plan_of, refusing, silu, silu_kernel, silu_of_kernel, taking
from torch import Tensor

from vllm_fl.contracts.binding import Binding, LayerTarget, OperatorTarget
from vllm_fl.engine.plan import Plan
from vllm_fl.integration.engines import calling
from vllm_fl.integration.patchers import operators
from vllm_fl.integration.patchers.process_wide import Choice
from vllm_fl.plugins.registry import known_contracts

PATCHER, CPU = operators.Operators(), torch.device("cpu")

X = torch.arange(32.0).reshape(4, 8)

LIBRARY = torch.library.Library("fl_test_operators", "DEF")
for schema in (
    "gated(Tensor(a!) out, Tensor input) -> ()",
    "longer(Tensor(a!) out, Tensor input, float scale=1.0, bool flip=False, *, int n=0) -> ()",
    "demanding(Tensor(a!) out, Tensor input, float scale) -> ()",
    "without_kernel(Tensor(a!) out, Tensor input) -> ()",
    "asking(Tensor(a!) out, Tensor input) -> ()",
):
    LIBRARY.define(schema)


def _own(out: Tensor, input: Tensor, *further: Any, **more: Any) -> None:
    """Stand-in for vLLM's kernel: the second half of the features."""
    out.copy_(input[..., input.shape[-1] // 2 :])


for name in ("gated", "longer", "demanding"):
    LIBRARY.impl(name, _own, "CPU")


def _asking(keyset: Any, out: Tensor, input: Tensor) -> None:
    assert keyset.has(torch._C.DispatchKey.CPU)
    _own(out, input)


LIBRARY.impl("asking", _asking, "CPU", with_keyset=True)


def target(name: str = "gated", *parameters: str) -> OperatorTarget:
    """An operator of this file's library as a target of silu_and_mul."""
    names = parameters or ("out", "input")
    return OperatorTarget(f"fl_test_operators::{name}", names, silu_kernel, silu_of_kernel)


def binding(*targets: Any) -> dict[str, Binding]:
    return {"silu_and_mul": Binding(targets or (target(),))}


def call(name: str = "gated", *further: Any, x: Tensor = X, **more: Any) -> Tensor:
    out = torch.full((*x.shape[:-1], x.shape[-1] // 2), -1.0)
    getattr(torch.ops.fl_test_operators, name)(out, x, *further, **more)
    return out


STOCK = X[..., 4:]
FIRST = half(X)


def engine(plan: Plan, bound: dict[str, Binding] | None = None) -> AbstractContextManager[Choice]:
    return taking(plan, bound or binding(), PATCHER)


@contextmanager
def overridden(fn: Callable[..., None], name: str = "gated") -> Iterator[torch.library.Library]:
    """A third-party override."""
    library = torch.library.Library("fl_test_operators", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl(name, fn, "CPU", allow_override=True)
    try:
        yield library
    finally:
        library._destroy()


def reported(plan: Plan, chosen: Choice, name: str = "gated") -> dict[str, Any]:
    report = PATCHER.report_targets(engine_of(plan), chosen)
    json.dumps(report)
    return report["silu_and_mul"][f"fl_test_operators::{name}"]


def test_a_caller_without_engine_gets_the_replaced_kernel_and_is_counted() -> None:
    plan = plan_of(silu("vendor.a"))
    with engine(plan) as chosen:
        with calling(None):
            assert torch.equal(call(), STOCK)
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        call()
        assert reported(plan, chosen)["without_engine"] == 2


@pytest.mark.parametrize("name", ["gated", "asking"])
def test_a_refused_call_falls_to_the_next_candidate_and_last_to_the_kernel(name: str) -> None:
    plan = plan_of(refusing("vendor.a", "no"), refusing("vendor.b", "nor I"))
    with engine(plan, binding(target(name))):
        assert torch.equal(call(name), STOCK)
    assert plan.fallbacks == {("silu_and_mul", "stock.vllm"): 1}
    plan = plan_of(refusing("vendor.a", "no"), silu("vendor.b", 5.0))
    with engine(plan, binding(target(name))):
        assert torch.equal(call(name), FIRST + 5)
    assert plan.fallbacks == {("silu_and_mul", "vendor.b"): 1}


def test_an_implementation_that_falls_to_the_operator_itself_gets_the_replaced_kernel() -> None:
    """As a later candidate; if it is the first, the operator stays vLLM's (below)."""
    own = silu("vendor.b", fn=silu_of_kernel(torch.ops.fl_test_operators.gated))
    plan = plan_of(refusing("vendor.a", "no"), own, counts_calls=True)
    with engine(plan) as chosen:
        assert chosen.names == {"silu_and_mul": ["fl_test_operators::gated"]}
        assert torch.equal(call(), STOCK)
    assert plan.fallbacks == {("silu_and_mul", "vendor.b"): 1}


def test_entered_again_is_per_thread_and_per_operator() -> None:
    """An implementation that waits must not send another thread's calls to vLLM's kernel."""
    inside, go, nested = threading.Event(), threading.Event(), threading.Event()

    def fn(x: Tensor) -> Tensor:
        if x is one_row:
            inside.set()
            assert go.wait(10)
        elif nested.is_set():
            return call("asking", x=x) + 100
        return half(x)

    one_row = X[:1]
    plan = plan_of(silu("vendor.a", fn=fn))
    with engine(plan, binding(target(), target("asking"))):

        def waits() -> None:
            with calling(engine_of(plan)):
                call(x=one_row)

        thread = threading.Thread(target=waits)
        thread.start()
        assert inside.wait(10)
        assert torch.equal(call(), FIRST)
        go.set()
        thread.join()
        # A nested call of another operator is ordinary: its override runs, and calls `fn` again.
        nested.set()
        assert torch.equal(call(), STOCK + 200)


def test_nothing_is_overridden_by_what_calls_the_operator_itself() -> None:
    own = silu("vendor.a", fn=silu_of_kernel(torch.ops.fl_test_operators.gated))
    plan = plan_of(own)
    with engine(plan, binding(target(), target("asking"))) as chosen:
        assert chosen.names == {"silu_and_mul": ["fl_test_operators::asking"]}
        assert reported(plan, chosen) == {"left": "vendor.a calls it itself"}
        assert torch.equal(call(), STOCK)


def test_each_of_two_engines_has_its_own_plan_and_the_last_takes_the_override_away() -> None:
    one, other = plan_of(silu("vendor.a", 1.0)), plan_of(silu("vendor.b", 2.0))
    stock = plan_of()
    with engine(one):
        with engine(other):
            assert torch.equal(call(), FIRST + 2)
            with calling(engine_of(one)):
                assert torch.equal(call(), FIRST + 1)
            with calling(engine_of(stock)):
                assert torch.equal(call(), STOCK)
            # One override serves both engines.
            assert torch._C._dispatch_dump("fl_test_operators::gated").count("CPU") == 2
        with calling(engine_of(other)):
            assert torch.equal(call(), STOCK)
        assert torch.equal(call(), FIRST + 1)
    assert torch._C._dispatch_dump("fl_test_operators::gated").count("CPU") == 1


def test_who_overrode_before_us_is_what_stock_means_and_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def theirs(out: Tensor, input: Tensor) -> None:
        out.fill_(7.0)

    plan = plan_of(refusing("vendor.a", "no"))
    with overridden(theirs):
        with caplog.at_level(logging.WARNING), engine(plan) as chosen:
            assert call().eq(7).all()
            assert Path(__file__).name in reported(plan, chosen)["replaced"]
        assert Path(__file__).name in caplog.text
        assert call().eq(7).all()
    assert torch.equal(call(), STOCK)


def test_who_overrode_after_us_is_named_and_ours_stays_beneath_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan = plan_of(silu("vendor.a", 1.0))
    with engine(plan) as chosen:
        assert reported(plan, chosen)["overridden_by"] is None
        beneath = torch.library.get_kernel("fl_test_operators::gated", "CPU")
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

        def theirs(out: Tensor, input: Tensor) -> None:
            beneath.call_boxed(keys, out, input)
            out.add_(1000)

        theirs_is_on_top = overridden(theirs)
        library = theirs_is_on_top.__enter__()
        assert torch.equal(call(), FIRST + 1001)
        assert Path(__file__).name in reported(plan, chosen)["overridden_by"]
        for _ in range(2):
            PATCHER.loaded(engine_of(plan))
        assert caplog.text.count("runs only if that override calls it") == 1
    assert Path(__file__).name in caplog.text
    # Theirs can still call ours, which now only forwards.
    assert torch.equal(call(), STOCK + 1000)
    library._destroy()
    assert torch.equal(call(), STOCK)
    with engine(plan_of(silu("vendor.b", 2.0))):
        assert torch.equal(call(), FIRST + 2)
    assert torch._C._dispatch_dump("fl_test_operators::gated").count("CPU") == 1


def test_a_call_of_a_size_that_is_left_to_vllm_goes_to_its_kernel_as_it_came() -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def theirs(out: Tensor, input: Tensor) -> None:
        seen.append((out, input))
        _own(out, input)

    def native(replaced: Callable[..., None]) -> Callable[..., Tensor]:
        return lambda x: pytest.fail("vLLM's kernel is called through the binding")

    small = {"<=2": "stock", "rest": "vendor"}
    plan, few = plan_of(silu("vendor.a", 10.0), order=small, counts_calls=True), X[:2]
    direct = replace(target(), tokens="input", native=native)
    with overridden(theirs), engine(plan, binding(direct)) as chosen:
        out = torch.empty(2, 4)
        torch.ops.fl_test_operators.gated(out, few)
        assert torch.equal(out, STOCK[:2])
        assert torch.equal(call(), FIRST + 10)
        torch.ops.fl_test_operators.gated(input=few, out=out)
        assert [(a is out, b is few) for a, b in seen] == [(True, True)] * 2
        found = reported(plan, chosen)
        assert found["without_engine"] == found["other_arguments"] == 0
    assert plan.calls == {("silu_and_mul", "vendor.a"): 1}
    assert not plan.fallbacks and not plan.record.refusals


def test_further_parameters_with_defaults_are_vllms_where_they_say_something() -> None:
    plan = plan_of(silu("vendor.a", 1.0))
    with engine(plan, binding(target("longer"))) as chosen:
        assert torch.equal(call("longer"), FIRST + 1)
        assert torch.equal(call("longer", 1.0, False, n=0), FIRST + 1)
        for args, more in (((2.0,), {}), ((1.0, True), {}), ((), {"n": 1}), ((), {"flip": True})):
            assert torch.equal(call("longer", *args, **more), STOCK), (args, more)
        assert reported(plan, chosen, "longer")["other_arguments"] == 4


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (target("no_such_thing"), "this vLLM has no such operator"),
        (target("without_kernel"), "this vLLM has no CPU kernel for it"),
        (target("demanding"), "it has further parameters without default: scale"),
        (target("gated", "input", "out"), "its parameters are out, input; expected: input, out"),
        (
            target("gated", "out", "input", "scale"),
            "its parameters are out, input; expected: out, input, scale",
        ),
    ],
)
def test_an_operator_that_does_not_fit_is_said_by_name(
    found: OperatorTarget, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_of(silu("vendor.a", 1.0))
    caplog.set_level(logging.DEBUG, logger="vllm_fl.engine")
    with engine(plan, binding(found, target("asking"))) as chosen:
        assert chosen.left == {"silu_and_mul": {found.name: why}}
        assert torch.equal(call("asking"), FIRST + 1), "the others are taken"
        assert PATCHER.report_targets(engine_of(plan), chosen)["silu_and_mul"][found.name] == {
            "left": why
        }
    assert f"{found.name} is not replaced: {why}" in caplog.text


def test_a_layer_that_the_user_leaves_to_vllm_gets_nothing_through_its_operator() -> None:
    layer = LayerTarget("vllm.model_executor.layers.activation.SiluAndMul")
    bound = binding(layer, target())
    plan = plan_of(silu("vendor.a", 1.0), kept_layers=frozenset({"SiluAndMul"}))
    note = PATCHER.note(plan, "silu_and_mul")
    assert "SiluAndMul is not replaced" in note
    with engine(plan, bound) as chosen:
        assert chosen.names == {} and reported(plan, chosen) == {"left": note}
        assert torch.equal(call(), STOCK)
    free = plan_of(silu("vendor.a", 1.0), kept_layers=frozenset({"RMSNorm"}))
    assert PATCHER.note(free, "silu_and_mul") == ""


def test_implementations_that_take_the_layer_are_passed_over() -> None:
    def layered(self: Any, x: Tensor) -> Tensor:
        raise AssertionError("an operator has no layer")

    first = silu("vendor.a", fn=layered)
    plan = plan_of(first, silu("vendor.b", 2.0))
    with engine(plan):
        assert torch.equal(call(), FIRST + 2)
    alone = plan_of(first)
    with engine(alone) as chosen:
        assert "need the calling layer" in reported(alone, chosen)["left"]


def test_compiled_code_calls_the_override_and_after_it_the_kernel() -> None:
    def model(x: Tensor) -> Tensor:
        y = x * 2
        out = y.new_empty((x.shape[0], x.shape[1] // 2))
        torch.ops.fl_test_operators.gated(out, y)
        return out + 1

    compiled = torch.compile(model, fullgraph=True, backend="inductor")
    plan = plan_of(silu("vendor.a", 10.0), mode="compiled", counts_calls=True)
    with engine(plan):
        assert torch.equal(compiled(X), 2 * FIRST + 11)
        assert torch.equal(compiled(X), 2 * FIRST + 11)
    assert plan.calls == {("silu_and_mul", "vendor.a"): 2}
    assert torch.equal(compiled(X), 2 * STOCK + 1)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    from vllm.platforms import current_platform

    current_platform.import_kernels()


ELSEWHERE = {
    "_C::causal_conv1d_update_cpu_vec",
    "_C::chunk_gated_delta_rule_cpu",
    "_C::cpu_fused_moe",
    "_C::dynamic_scaled_int8_quant",
    "_C::fused_gdn_gating_cpu",
    "_C::fused_sigmoid_gating_delta_rule_update_cpu",
    "_C::prepack_moe_weight",
    "_C::static_scaled_int8_quant",
}
"""Operators that return their results, pack weights, or have no tensor from the oracle; tested in
`test_linear_attention.py`, `test_experts.py` and `contracts/test_quantised.py`."""

OPERATORS = sorted(
    {
        (op, p.name)
        for op, b in known_contracts().bindings.items()
        for p in b.targets
        if isinstance(p, OperatorTarget) and p.name not in ELSEWHERE
    }
)


HERE = {
    "_C::fused_add_rms_norm",
    "_C::gelu_and_mul",
    "_C::gelu_tanh_and_mul",
    "_C::rms_norm",
    "_C::rotary_embedding",
    "_C::silu_and_mul",
}
"""Operators of vLLM's CPU build; others may exist only in its CUDA build."""


def exists(name: str) -> bool:
    schema = operators._schema(name)
    return bool(schema and schema.arguments)  # a build may reserve a name for a later release


def test_every_operator_that_this_vllm_has_fits() -> None:
    assert all(exists(name) for name in HERE)
    for op, bound in known_contracts().bindings.items():
        targets = [p for p in bound.targets if isinstance(p, OperatorTarget) and exists(p.name)]
        fitting = {p.name for p in targets if not PATCHER.misfit(p, CPU)}
        assert fitting == {p.name for p in targets}, op


WEIGHTS = (torch.rand(64), None)


def arguments(op: str, name: str) -> list[tuple[tuple[Any, ...], tuple[int, ...]]]:
    """Calls of an operator: (arguments, indices of written arguments)."""
    torch.manual_seed(0)
    if name == "_C::fused_add_rms_norm":
        return [((torch.randn(5, 64), torch.randn(5, 64), w, 1e-6), (0, 1)) for w in WEIGHTS]
    if name != "_C::rotary_embedding":
        return sampled(op, name)
    cache = torch.randn(32, 16)
    at = torch.tensor([3, 1, 31, 0, 7])
    qkv = torch.randn(5, 4 * 16 + 2 * 16)
    q, k = qkv[:, :64], qkv[:, 64:]
    return [
        ((at, query, key, 16, cache, neox), (1, 2))
        for query, key in ((q.clone(), k.clone()), (q.clone(), None), (q, k))
        for neox in (True, False)
    ]


def sampled(op: str, name: str) -> list[tuple[tuple[Any, ...], tuple[int, ...]]]:
    """Calls from the contract's samples, in the form for the replaced kernel."""
    kinds = (
        p
        for p in known_contracts().bindings[op].targets
        if isinstance(p, OperatorTarget) and p.name == name
    )
    target, calls = next(kinds), list[tuple[Any, ...]]()
    dtype = torch.bfloat16 if name.endswith("_mla_cpu") else torch.float32  # it supports no other
    for sample in known_contracts().contracts[op].samples(dtype, torch.device("cpu")):
        if sample.name.startswith(("0 token", "16 token")):
            target.native(lambda *args: calls.append(args))(*sample.args)
    return [
        (args, tuple(at for at, a in enumerate(args) if isinstance(a, Tensor))) for args in calls
    ]


def alike(tensor: Tensor) -> Tensor:
    copied = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return copied.copy_(tensor)


@pytest.mark.parametrize(("op", "name"), OPERATORS)
@pytest.mark.parametrize("stock", [False, True], ids=["oracle", "refused"])
def test_an_overridden_operator_of_vllms_computes_what_its_kernel_does(
    op: str, name: str, stock: bool
) -> None:
    """Compared with the contract's oracle; and with vLLM's kernel after an unsupported call."""
    from vllm_fl.plugins.types import BackendImplKind, OpImpl

    # Tests of empty builds define operators, which stay defined.
    if not exists(name) or not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
        pytest.skip(f"this build of vLLM has no {name}")
    spec = known_contracts().contracts[op]

    def in_the_dtype(*args: Any) -> Any:
        result = spec.oracle(*args)
        if not isinstance(result, tuple):
            return result.to(args[0].dtype)
        return tuple(None if r is None else r.to(args[0].dtype).contiguous() for r in result)

    in_the_dtype.__signature__ = spec.signature  # type: ignore[attr-defined]
    refuse: Any = (lambda *args: "never") if stock else None
    if refuse:
        refuse.__signature__ = spec.signature
    impl = OpImpl(op, "vendor.acme", BackendImplKind.VENDOR, in_the_dtype, "acme", supports=refuse)
    plan = plan_of(impl, counts_calls=True)
    namespace, _, short = name.partition("::")
    operator = getattr(getattr(torch.ops, namespace), short)
    bound = {op: known_contracts().bindings[op]}
    for args, written in arguments(op, name):
        wanted = [alike(a) if isinstance(a, Tensor) else a for a in args]
        if all(a.numel() for a in args if isinstance(a, Tensor)):
            operator(*wanted)
        with engine(plan, bound) as chosen:
            assert name in chosen.names[op]
            operator(*args)
        for at in written:
            if wanted[at] is not None:
                torch.testing.assert_close(args[at], wanted[at], rtol=2e-5, atol=2e-5)
                assert torch.equal(args[at], wanted[at]) or not stock
    assert plan.calls or name == "_C::rotary_embedding"
    if stock:
        assert set(plan.fallbacks) == {(op, "stock.vllm")}
