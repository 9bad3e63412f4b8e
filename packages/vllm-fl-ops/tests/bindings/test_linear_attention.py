"""Targets of linear attention and of short convolutions, against the contracts' oracles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from builders import managing, planning, taking
from of_acme import acme
from oracle_mutants import oracle_impl
from torch import Tensor

from vllm_fl.contracts import OpSpec
from vllm_fl.contracts.binding import FunctionTarget, LayerTarget, OperatorTarget
from vllm_fl.engine.plan import Plan
from vllm_fl.plugins.registry import known_contracts
from vllm_fl_ops.bindings._hybrid import FLA_EPSILON

CPU = torch.device("cpu")
OPS = (
    "causal_conv1d",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "gdn_gating",
    "recurrent_gated_delta_rule",
)
TARGETS = [
    pytest.param(op, target, id=f"{op}-{target.name}-{len(target.parameters)}")
    for op in OPS
    for target in known_contracts().bindings[op].targets
    if isinstance(target, FunctionTarget | OperatorTarget)
]
DEFAULTS = {
    "activation": "silu",
    "pad_slot_id": -1,
    "null_block_id": 0,
    "block_size_to_align": 0,
    "max_query_len": -1,
    "validate_data": False,
    "beta": 1.0,
    "threshold": 20.0,
    "inplace_final_state": True,
    "num_accepted_tokens": None,
}
"""Defaults of vLLM's functions for omitted arguments; None for all others."""

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


def called_as(target: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which takes all of a target's parameters, called as vLLM calls its own."""

    def own(*args: Any, **named: Any) -> Any:
        given = {**DEFAULTS, **dict(zip(target.parameters, args, strict=False)), **named}
        return function(*(given.get(name) for name in target.parameters))

    return own


def copied(args: Any) -> list[Any]:
    return [a.clone() if isinstance(a, Tensor) else a for a in args]


@pytest.mark.parametrize(("op", "target"), TARGETS)
def test_what_a_place_calls_and_what_calls_it_are_each_others_inverse(op: str, target: Any) -> None:
    spec, tried = known_contracts().contracts[op], 0
    op_fn = oracle_impl(spec).fn
    through = target.native(called_as(target, target.route(op_fn)))
    for sample in spec.samples(torch.bfloat16, CPU):
        if "epsilon" in spec.parameters and sample.args[-1] != FLA_EPSILON:
            continue  # vLLM's kernels support only one
        got, want = through(*copied(sample.args)), op_fn(*sample.args)
        for mine, exact in zip(got, want, strict=True):
            assert mine.dtype == exact.dtype, sample.name
            torch.testing.assert_close(mine, exact, rtol=2e-2, atol=2e-2, equal_nan=True)
        tried += 1
    assert tried >= 7


def refuses(op: str, name: str, count: int | None = None) -> Callable[..., Any]:
    """The target's function over an op that must not be called."""

    def never(*args: Any) -> Any:
        raise AssertionError(f"{op} was called")

    targets = (
        p
        for p in known_contracts().bindings[op].targets
        if isinstance(p, FunctionTarget | OperatorTarget) and p.name.endswith(name)
    )
    target = next(p for p in targets if count in (None, len(p.parameters)))
    return called_as(target, target.route(never))


def test_calls_with_several_tokens_of_a_sequence_are_left_to_vllm() -> None:
    q = torch.zeros(1, 4, 2, 8)
    gates, one = torch.zeros(4, 2), torch.zeros(2)
    at = torch.arange(5, dtype=torch.int32)
    update = refuses("recurrent_gated_delta_rule", "gating_delta_rule_update")

    def asked(**change: Any) -> Any:
        plain = {"initial_state": q.new_zeros(6, 2, 8, 8), "cu_seqlens": at}
        plain["ssm_state_indices"] = at[1:]
        return update(one, gates, gates, one, q, q, q, **{**plain, **change})

    with pytest.raises(AssertionError, match="was called"):
        asked()
    for change in (
        {"cu_seqlens": at[::2]},
        {"ssm_state_indices": at[1:, None]},
        {"num_accepted_tokens": at[1:]},
        {"inplace_final_state": False},
        {"scale": 1.0},
        {"threshold": 30.0},
        {"initial_state": None},
    ):
        assert asked(**change) is NotImplemented

    convolve = refuses("causal_conv1d_update", "causal_conv1d_update", 13)
    x, state, weight = torch.zeros(4, 8), torch.zeros(6, 8, 3), torch.zeros(8, 4)
    with pytest.raises(AssertionError, match="was called"):
        convolve(x, state, weight, conv_state_indices=at[1:])
    assert convolve(x, state, weight) is NotImplemented
    for change in (
        {"query_start_loc": at},
        {"num_accepted_tokens": at[1:]},
        {"initial_state_idx": at[1:]},
        {"null_block_id": 3},
    ):
        assert convolve(x, state, weight, conv_state_indices=at[1:], **change) is NotImplemented
    assert convolve(x.half(), state, weight, conv_state_indices=at[1:]) is NotImplemented


def test_states_per_block_and_other_dtypes_are_left_to_vllm() -> None:
    convolve = refuses("causal_conv1d", "causal_conv1d_fn", 16)
    x, state, weight = torch.zeros(8, 4), torch.zeros(6, 8, 3), torch.zeros(8, 4)
    at = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(AssertionError, match="was called"):
        convolve(x, weight, None, state, at, at[1:])
    assert convolve(x, weight, None, state, at) is NotImplemented
    assert convolve(x, weight, None, state, at, at[1:, None]) is NotImplemented
    assert convolve(x, weight, None, state, at, at[1:], pad_slot_id=7) is NotImplemented
    assert convolve(x, weight, None, state, at, at[1:], initial_state_idx=at) is NotImplemented
    assert convolve(x, weight, None, state.half(), at, at[1:]) is NotImplemented


def test_the_layer_adds_a_dimension_and_takes_flags() -> None:
    spec = known_contracts().contracts["chunk_gated_delta_rule"]
    (target,) = (
        p for p in known_contracts().bindings[spec.name].targets if isinstance(p, LayerTarget)
    )
    assert target.adapt is not None
    op = oracle_impl(spec).fn
    forward = target.adapt(None, op)
    sample = next(s for s in spec.samples(torch.bfloat16, CPU) if s.name.startswith("two"))
    *qkv, state, at, _ = sample.args
    flat = [x[None] for x in qkv]
    for normed in (True, False):
        want, last = op(*qkv, state, at, FLA_EPSILON if normed else None)
        buffer = torch.zeros(80, *want.shape[1:], dtype=want.dtype)
        out, final = forward(
            *flat, state, True, at, use_qk_l2norm_in_kernel=normed, core_attn_out=buffer
        )
        assert torch.equal(out[0].nan_to_num(), want.nan_to_num())
        assert torch.equal(final.nan_to_num(), last.nan_to_num())
        assert torch.equal(buffer[: len(want)].nan_to_num(), want.nan_to_num())
    out, final = forward(*(x.unflatten(1, (2, 35))[0] for x in flat), state, False)
    want, _ = op(*qkv, state, torch.tensor([0, 35, 70]), FLA_EPSILON)
    assert final is None and torch.equal(out.flatten(0, 1), want)


def serving_plan(spec: OpSpec, refused: bool) -> Plan:
    refuse = (lambda *args: "never") if refused else None
    impl = acme(spec.name, oracle_impl(spec).fn, supports=refuse)
    return replace(planning(managing(impl)), counts_calls=True)


@contextmanager
def overridden(plan: Plan, op: str) -> Iterator[dict[str, list[str]]]:
    """An engine with this plan; yields op -> the names overridden in vLLM."""
    from vllm_fl.integration.patchers import functions, operators

    patchers = operators.Operators(), functions.Functions()
    bound = {op: known_contracts().bindings[op]}
    with taking(plan, bound, *patchers, dtype=torch.bfloat16) as (kernels, python):
        yield {op: kernels.names.get(op, []) + python.names.get(op, [])}


def operator_calls() -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """(op, operator, arguments) as vLLM's CPU build calls it, in its layouts."""
    torch.manual_seed(0)
    half, heads, size, tokens = torch.bfloat16, 2, 64, 5
    a, b = (torch.randn(tokens, heads, dtype=half) for _ in "ab")
    A_log, bias = torch.rand(heads), torch.randn(heads, dtype=half)
    q, k, v = (torch.randn(1, tokens, heads, size, dtype=half) for _ in "qkv")
    pool = torch.randn(7, heads, size, size)
    at, two = torch.arange(tokens + 1).int(), torch.tensor([3, 1]).int()
    yield "gdn_gating", "fused_gdn_gating_cpu", (A_log, a, b, bias)
    g, beta = -torch.rand(1, tokens, heads), torch.rand(1, tokens, heads).to(half)
    chunked = (q, k, v, g, beta, pool, True, at[[0, 2, 5]], False, True, two)
    yield "chunk_gated_delta_rule", "chunk_gated_delta_rule_cpu", chunked
    step = (A_log, bias, q, k, v, a, b, pool, at[:-1].flip(0) + 2, at, True)
    yield "recurrent_gated_delta_rule", "fused_sigmoid_gating_delta_rule_update_cpu", step
    states = torch.randn(7, 3, size, dtype=half).transpose(1, 2)
    x, weight = torch.randn(tokens, size, dtype=half), torch.randn(size, 4, dtype=half)
    update = (x, states, weight, None, "silu", at[:-1].flip(0) + 1, None, 0)
    yield "causal_conv1d_update", "causal_conv1d_update_cpu_vec", update


@needs_vllm
@pytest.mark.parametrize("refused", [False, True], ids=["oracle", "refused"])
@pytest.mark.parametrize(
    ("op", "name", "args"), list(operator_calls()), ids=lambda value: str(value)[:30]
)
def test_an_overridden_operator_gives_and_writes_what_its_kernel_does(
    op: str, name: str, args: tuple[Any, ...], refused: bool
) -> None:
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if not hasattr(torch.ops._C, name):
        pytest.skip(f"this build of vLLM has no {name}")
    operator = getattr(torch.ops._C, name)
    stock = copied(args)
    wanted = operator(*stock)
    plan, given = serving_plan(known_contracts().contracts[op], refused), copied(args)
    with overridden(plan, op) as taken:
        assert f"_C::{name}" in taken[op]
        got = operator(*given)
    results, exact = (r if isinstance(r, tuple) else (r,) for r in (got, wanted))
    before = zip((*results, *given), (*exact, *stock), strict=True)
    for mine, theirs in before:
        if isinstance(theirs, Tensor):
            assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
            room = 0.0 if refused else 3e-2
            torch.testing.assert_close(mine, theirs, rtol=room, atol=room, equal_nan=True)
    assert plan.calls
    assert set(plan.fallbacks) == ({(op, "stock.vllm")} if refused else set())


@needs_vllm
@pytest.mark.parametrize("refused", [False, True], ids=["oracle", "refused"])
def test_the_cpu_builds_convolution_is_answered_where_linear_attention_calls_it(
    refused: bool,
) -> None:
    module = pytest.importorskip("vllm.model_executor.layers.mamba.ops.cpu.gdn_attention")
    torch.manual_seed(0)
    x, weight = torch.randn(5, 8).to(torch.bfloat16), torch.randn(8, 4).to(torch.bfloat16)
    states = torch.randn(4, 3, 8).to(torch.bfloat16).transpose(1, 2)

    def call() -> tuple[Tensor, Tensor]:
        cache = states.clone()
        out = module.causal_conv1d_torch(
            x=x.transpose(0, 1),
            weight=weight,
            bias=None,
            conv_states=cache,
            query_start_loc=torch.tensor([0, 4, 5], dtype=torch.int32),
            cache_indices=torch.tensor([2, 1], dtype=torch.int32),
            has_initial_state=torch.tensor([True, False]),
            activation="silu",
        )
        return out, cache

    stock, plan = call(), serving_plan(known_contracts().contracts["causal_conv1d"], refused)
    with overridden(plan, "causal_conv1d") as taken:
        assert len(taken["causal_conv1d"]) == 1
        got = call()
    for mine, theirs in zip(got, stock, strict=True):
        room = 0.0 if refused else 2e-2
        torch.testing.assert_close(mine, theirs, rtol=room, atol=room, equal_nan=True)
    assert plan.calls
    assert module.causal_conv1d_torch.__module__.endswith("ops.cpu.causal_conv1d")
