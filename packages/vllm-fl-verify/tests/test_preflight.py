"""Startup verification: detected faults, and accepted implementations."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import graph_on_cpu
import pytest
import torch
from builders import silu
from of_acme import acme
from of_acme import silu_and_mul as sound
from oracle_mutants import oracle_impl
from torch import Tensor

from vllm_fl.contracts import ModelSizes
from vllm_fl.dispatch.resolver import Candidate, Trace
from vllm_fl.engine.plan import Plan, PlanEntry
from vllm_fl.plugins import breadcrumb
from vllm_fl.plugins.inspection import Objection
from vllm_fl.plugins.registry import known_contracts
from vllm_fl_verify import graphs, preflight, trials
from vllm_fl_verify.preflight import Findings, find_faults
from vllm_fl_verify.trials import Request, Role
from vllm_fl_verify.verification import compare

SIZES = ModelSizes(256, 512, 4, 2, 64, 64, tokens=(1, 2048))
SMALL = replace(SIZES, tokens=(1, 64))
CPU = torch.device("cpu")
norm, rope = (
    oracle_impl(known_contracts().contracts[op]).fn for op in ("rms_norm", "rotary_embedding")
)
KEY = "silu_and_mul", "vendor.acme"


@pytest.fixture(autouse=True)
def no_more_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token counts that are always tried detect the fault."""
    monkeypatch.setattr(trials, "CALLS", 0)


def raises(x: Tensor) -> Tensor:
    raise RuntimeError("no kernel image")


def ends(x: Tensor) -> Tensor:
    raise SystemExit(0)


def gives_nan(x: Tensor) -> Tensor:
    return sound(x) * float("nan")


def wrong_above_64_tokens(x: Tensor) -> Tensor:
    result = sound(x)
    result[64:] = 0
    return result


def wrong_in_the_last_row_of_a_large_batch(x: Tensor) -> Tensor:
    result = sound(x)
    if len(x) > 1000:
        result[-1] = 0
    return result


def cuts_off(x: Tensor) -> Tensor:
    """Truncates: each result is within one step, towards zero."""
    return (sound(x.float()).view(torch.int32) & -(1 << 16)).view(torch.float32).to(x.dtype)


def rounds_up(x: Tensor) -> Tensor:
    """Rounds away from zero."""
    bits = sound(x.float()).view(torch.int32)
    return ((bits + 0xFFFF) & -(1 << 16)).view(torch.float32).to(x.dtype)


def overwrites_its_input(x: Tensor) -> Tensor:
    result = sound(x)
    x.zero_()
    return result


def found_in(*roles: Role, sizes: ModelSizes = SIZES, **more: Any) -> Findings:
    return find_faults(Request(roles, torch.bfloat16, CPU, sizes, **more))


def fault(
    op: str,
    fn: Callable[..., Any],
    sizes: ModelSizes = SIZES,
    compiled: Any = None,
    compares: bool = True,
    **fields: Any,
) -> str | None:
    role = Role(acme(op, fn, **fields), compiled=compiled)
    found = found_in(role, sizes=sizes, backend="aot_eager", compares=compares)
    assert set(found.objections) <= {role.key}
    return next((objection.reason for objection in found.objections.values()), None)


fault_of = partial(fault, "silu_and_mul")


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (raises, "it raised RuntimeError: no kernel image"),
        (ends, "it raised SystemExit"),
        (gives_nan, "elements exceed the tolerance"),
        (lambda x: sound(x).nan_to_num(), "(NaN and infinity"),
        (lambda x: sound(x)[..., :-1], "has shape"),
        (lambda x: sound(x) * (1.1 if x.dtype is torch.bfloat16 else 1.0), "bfloat16"),
        (wrong_above_64_tokens, "300 rows, bfloat16)"),
        (wrong_in_the_last_row_of_a_large_batch, " x 2*512, bfloat16)"),
        (overwrites_its_input, "overwrote 'x'"),
        (cuts_off, "the result is biased: too small by"),
        (cuts_off, "too small by 0.5"),
        (rounds_up, "too large by 0.5"),
    ],
)
def test_faults_are_found_and_say_what_is_wrong(fn: Callable[..., Any], said: str) -> None:
    assert said in str(fault_of(fn))


def in_plain_pytorch(x: Tensor) -> Tensor:
    """The product of chunks has the strides of a transposed x."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("fn", [sound, in_plain_pytorch])
def test_a_sound_implementation_passes_and_the_global_generator_is_left_alone(
    fn: Callable[..., Any],
) -> None:
    before = torch.get_rng_state()
    assert fault_of(fn) is None
    assert torch.equal(torch.get_rng_state(), before)


def test_run_only_runs() -> None:
    assert fault_of(gives_nan, compares=False) is None
    assert "no kernel image" in str(fault_of(raises, compares=False))


def test_one_that_refuses_all_sizes_of_the_model_is_out() -> None:
    impl = silu("vendor.acme", fn=sound, supports=lambda x: "no 2-D" if x.ndim == 2 else True)
    why = "it supports no call of this model (1 x 2*512, bfloat16: no 2-D)"
    assert found_in(Role(impl)).objections == {KEY: Objection("FL412", why)}


@pytest.mark.parametrize(
    ("provided", "asked"),
    [
        ((), {torch.bfloat16}),  # unknown
        (({"weight": torch.float32},), {torch.float32}),
        (({"weight": torch.float32}, {"weight": torch.bfloat16}), {torch.float32, torch.bfloat16}),
        (({"weight": torch.float64},), {torch.bfloat16}),  # not a call of the contract
    ],
)
def test_made_calls_have_the_dtypes_that_the_layers_provide(provided: Any, asked: Any) -> None:
    """Gemma's norms pass a float32 weight, which sizes and the model's dtype do not show."""
    seen: set[torch.dtype] = set()
    refused: set[torch.dtype] = set()

    def supports(x: Any, residual: Any, weight: Any, *others: Any) -> bool | str:
        if x.ndim == 2 and x.shape[-1] == SIZES.hidden:
            seen.add(weight.dtype)
            return weight.dtype not in refused or f"weight is {weight.dtype}"
        return True if x.shape[-1] != SIZES.head_size else "heads"

    def codes() -> list[str]:
        role = Role(acme("rms_norm", norm, supports=supports))
        found = found_in(role, sizes=SMALL, provided={"rms_norm": provided}, calls=0)
        return [objection.code for objection in found.objections.values()]

    assert codes() == [] and seen == asked
    refused.add(torch.float32)
    assert codes() == ["FL412"] * (asked == {torch.float32})


def test_one_that_refuses_an_edge_only_passes() -> None:
    assert fault_of(sound, supports=lambda x: "no 3-D" if x.ndim == 3 else True) is None


def test_a_slow_one_is_named_while_it_runs_and_out_after(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(breadcrumb, "SLOW", 0.2)

    def slow(x: Tensor) -> Tensor:
        time.sleep(0.3)
        while "one call of" not in caplog.text:
            time.sleep(0.01)
        return sound(x)

    with caplog.at_level(logging.DEBUG, "vllm_fl"):
        fault = fault_of(slow)
    assert fault is not None and fault.startswith("it takes ")
    assert "one call of silu_and_mul=vendor.acme (" in caplog.text
    assert re.search(r"silu_and_mul=vendor\.acme: samples [\d.]+ s$", caplog.text, re.MULTILINE)


@pytest.mark.parametrize(("slow", "said"), [(1, None), (2, "it takes 11 s for one call")])
def test_one_that_is_slow_once_while_it_compiles_passes(
    slow: int, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, now = [], [0.0]
    clock = SimpleNamespace(**{**vars(time), "monotonic": lambda: now[0]})
    monkeypatch.setattr(breadcrumb, "time", clock)

    def compiles(x: Tensor) -> Tensor:
        calls.append(len(x))
        now[0] += 11.0 * (len(calls) <= slow)
        return sound(x)

    fault = fault_of(compiles)
    assert fault is None if said is None else str(fault).startswith(said)


def fault_compiled(fn: Callable[..., Any], strict: bool = False, **fields: Any) -> str | None:
    """The fault of a rope in a compiled plan without other candidates."""
    op, contracts = "rotary_embedding", known_contracts().contracts
    impl = acme(op, fn, **fields)
    trace = Trace(op, "compiled", (), (Candidate(impl, "selected", "asked for"),))
    entries = {op: PlanEntry(op, ((None, trace),))}
    plan = Plan("compiled", entries, contracts=contracts, strict=strict)
    return fault(op, fn, compiled=plan.as_compiled(op, impl), **fields)


def test_one_that_turns_heads_of_one_projection_in_place_can_be_compiled() -> None:
    """Its inputs share memory at startup; in a model the graph makes them without aliases."""

    def in_place(query: Any, key: Any, *rest: Any) -> Any:
        turned = rope(query, key, *rest)
        return query.copy_(turned[0]), None if key is None else key.copy_(turned[1])

    assert fault_compiled(in_place, consumes=frozenset({"query", "key"})) is None


@pytest.mark.parametrize(("asked", "strict"), [(True, True), (False, False)])
def test_one_that_refuses_a_form_that_the_model_need_not_have_can_be_compiled(
    asked: bool, strict: bool
) -> None:
    """It has no fallback: its chain fails for that call, which is not its fault."""

    def halves(*args: Any) -> Any:
        if args[5]:
            raise NotImplementedError("takes halves only")
        return rope(*args)

    def supports(*args: Any) -> bool | str:
        return "takes halves only" if args[5] else True

    more = {"supports": supports if asked else None, "traceable": True}
    assert fault_compiled(halves, strict, **more) is None


@pytest.mark.parametrize("wrong", [(11, 11), (17, 2047), (48, 48), (2048, 2048)])
def test_what_is_wrong_at_some_token_counts_only(
    wrong: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "CALLS", 1e9)  # 48 is one of the further counts

    def fn(x: Tensor) -> Tensor:
        result = sound(x)
        return result + 1.0 if wrong[0] <= len(x) <= wrong[1] else result

    assert "elements exceed the tolerance" in str(fault_of(fn))


def test_what_is_wrong_at_far_positions_only() -> None:
    def fn(*args: Any) -> Any:
        return rope(*args[:4], args[4].clamp(max=2047), args[5])

    long = ModelSizes(256, 512, 4, 2, 64, 64, tokens=(1, 64), max_position=8192)
    assert "elements exceed the tolerance" in str(fault("rotary_embedding", fn, sizes=long))
    assert fault("rotary_embedding", fn) is None  # correct for a shorter model


def test_a_result_that_is_not_contiguous_or_not_dense() -> None:
    def strided(x: Tensor) -> Tensor:
        return sound(x).mT.contiguous().mT if x.ndim > 1 else sound(x)

    assert "the contract requires a contiguous result" in str(fault_of(strided))
    sparse = fault_of(lambda x: sound(x).to_sparse())
    assert sparse is not None and "is sparse" in sparse


def test_what_is_wrong_when_compiled_only() -> None:
    def fn(x: Tensor) -> Tensor:
        return sound(x) * (2.0 if torch.compiler.is_compiling() else 1.0)

    assert fault_of(fn, traceable=True) is None
    said = fault_of(fn, compiled=fn, traceable=True)
    assert said is not None and "(compiled by aot_eager, 5 x" in said


def test_one_that_takes_the_layer_is_given_one() -> None:
    def fn(obj: Any, x: Tensor, residual: Tensor | None = None) -> Any:
        return norm(x, residual, obj.weight, obj.variance_epsilon, obj.variance_size_override)

    assert fault("rms_norm", fn) is None
    wrong = fault("rms_norm", lambda obj, x, residual=None: norm(x, residual, obj.weight, 0.1))
    assert "elements exceed the tolerance" in str(wrong)


def test_one_that_takes_the_layer_is_given_plain_layers_only() -> None:
    """The older form reads a layer's weight, and supports no other kind of layer."""

    def fn(obj: Any, x: Tensor, residual: Tensor | None = None) -> Any:
        normed = norm(x, residual, None, obj.variance_epsilon)
        if residual is None:
            return normed * obj.weight
        return normed[0] * obj.weight, normed[1]

    assert fault("rms_norm", fn) is None
    spec = known_contracts().contracts["rms_norm"]
    said = {
        sample.name: compare(acme("rms_norm", fn), spec, sample, torch.bfloat16).reason
        for sample in spec.samples(torch.bfloat16, CPU)
    }
    assert "has no weight" in said["weight=None"]
    assert "has a weight of torch.float32" in said["fp32 weight"]
    assert "over a part of its features" in said["variance_size, residual"]
    assert not said["3-D"]


def test_the_counts_include_the_edges_and_depend_on_the_seed() -> None:
    always, further = trials.token_counts(2048, seed=1)
    every = {*always, *further}
    tried = {*every, *(n - 1 for n in always)}  # each of these also with one row less
    assert {*range(1, 65), 127, 128, 129, 1023, 1024, 1025, 2047, 2048} <= tried
    assert every <= set(range(1, 2049))
    assert 2048 in always
    assert trials.token_counts(2048, seed=1) == (always, further)
    assert {*trials.token_counts(2048, seed=2)[1]} != {*further}
    assert trials.token_counts(1, seed=1) == ([1], [])
    always, further = trials.token_counts(2048, seed=1, smallest=1000)
    assert {1000, 1024, 1025, 2047, 2048} <= {n - d for n in (*always, *further) for d in (0, 1)}
    assert min(*always, *further) == 1000


def test_unknown_sizes_have_no_calls() -> None:
    sizes = ModelSizes(256, None, 4, 2, None, None, tokens=(1, 64))
    assert fault_of(lambda x: sound(x) * (2.0 if x.shape[-1] == 1024 else 1.0),
                 sizes=sizes) is None  # fmt: skip


def takes_a_number_of_the_data(x: Tensor) -> Tensor:
    # On CUDA it is read once, during capture, and never again, or the capture fails.
    top = float(x.abs().nan_to_num(nan=float("inf")).max()) if x.numel() else 0.0
    return sound(x.clamp(-top, top))


def cannot_be_captured(x: Tensor) -> Tensor:
    if graph_on_cpu.is_capturing():
        raise RuntimeError("operation not permitted when stream is capturing")
    return sound(x)


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (sound, None),
        (takes_a_number_of_the_data, "it is incorrect when a graph is replayed with large values"),
        (cannot_be_captured, "it cannot be captured in a graph: "),
    ],
)
def test_what_is_wrong_in_a_captured_graph_alone(
    fn: Callable[..., Any], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "captured", graph_on_cpu.captured)
    role = Role(acme("silu_and_mul", fn))
    assert not found_in(role, sizes=SMALL, calls=0).objections
    found = found_in(replace(role, captured=64), sizes=SMALL, calls=0).objections
    assert list(found) == ([] if said is None else [KEY])
    if said is not None:
        assert found[KEY].reason.startswith(said)


def test_one_that_serves_few_tokens_is_tried_with_as_many() -> None:
    """Its row ends there: no call of the engine has more tokens."""
    impl = acme("silu_and_mul", wrong_in_the_last_row_of_a_large_batch)
    for most, faults in ((64, 0), (math.inf, 1)):
        assert len(found_in(Role(impl, most=most), calls=0).objections) == faults


def test_each_is_tried_with_batches_of_its_own_rows() -> None:
    """Token counts of another implementation's rows are not tried."""

    def fn(x: Tensor) -> Tensor:
        return sound(x) * (len(x) <= 512)  # larger than the contract's samples

    small = Role(acme("silu_and_mul", fn), most=512)
    large = Role(acme("silu_and_mul", sound, "other"), least=513)
    assert not found_in(small, large, calls=0).objections


def test_the_host_computes_with_few_threads_beside_a_device() -> None:
    """And with all threads if the host is the device."""
    before = torch.get_num_threads()
    torch.set_num_threads(12)
    try:
        for device, threads in (("cpu", 12), ("meta", 8)):
            with preflight.host_threads(torch.device(device)):
                assert torch.get_num_threads() == threads
            assert torch.get_num_threads() == 12
    finally:
        torch.set_num_threads(before)
