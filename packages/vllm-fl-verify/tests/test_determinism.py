"""Whether an implementation's bits stay equal in another run, and in another batch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from builders import extended, managing, planning, silu
from of_acme import acme, silu_and_mul
from oracle_mutants import oracle_impl
from torch import Tensor

from vllm_fl.contracts import ModelSizes
from vllm_fl.engine.facts import EngineFacts
from vllm_fl.engine.plan import make_plan
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.types import AttentionImpl, BackendImplKind, OpImpl
from vllm_fl.settings.loading import load_settings
from vllm_fl_verify.batches import POOL
from vllm_fl_verify.determinism import (
    FIXED_BATCH,
    NO_ROWS,
    Determinism,
    determinism_of,
    unmeasured,
    variance,
)
from vllm_fl_verify.preflight import find_faults
from vllm_fl_verify.trials import Request, Role, Trials

SIZES = ModelSizes(64, 96, 4, 2, 16, 16, tokens=(1, 300))
CPU = torch.device("cpu")
of = partial(acme, "silu_and_mul")


def sound(x: Tensor) -> Tensor:
    """Row by row, so a row's bits do not depend on its batch."""
    rows = [silu_and_mul(row.double()) for row in x.reshape(-1, x.shape[-1])]
    return torch.stack(rows).to(x.dtype).reshape(*x.shape[:-1], x.shape[-1] // 2)


def nudged(x: Tensor, where: Tensor | slice | int) -> Tensor:
    """Within every tolerance, but not bitwise equal."""
    result = sound(x)
    if result.numel():
        result[where] = torch.nextafter(result[where], torch.tensor(torch.inf, dtype=x.dtype))
    return result


def measured(impl: OpImpl, sizes: ModelSizes | None = SIZES, **options: Any) -> Determinism:
    trials = Trials(known_contracts().contracts[impl.op_name], torch.float32, CPU, sizes, 0)
    return determinism_of(impl, trials, **options)


@pytest.mark.parametrize(
    ("fn", "is_invariant"),
    [
        (sound, True),
        (lambda x: sound(x).fill_(-0.0), True),
        (lambda x: sound(x).fill_(-0.0 if len(x) > 32 else 0.0), False),
        (lambda x: nudged(x, slice(None)) if len(x) > 32 else sound(x), False),
        (lambda x: nudged(x, slice(None)) if len(x) == 1 else sound(x), False),
        (lambda x: nudged(x, -1) if x.ndim == 2 else sound(x), False),  # like a kernel's tail
    ],
)
def test_bits_that_depend_on_the_batch_are_found(fn: Any, is_invariant: bool) -> None:
    found = measured(of(fn))
    assert (found.runs, found.batches, not found.reason) == (True, is_invariant, is_invariant)
    for part in ("different bits in batches of", "2*96, float32"):
        assert is_invariant or part in found.reason


def test_what_differs_between_two_runs_is_neither() -> None:
    calls = []

    def each_time_another(x: Tensor) -> Tensor:
        calls.append(1)
        return nudged(x, slice(None)) if len(calls) % 2 else sound(x)

    found = measured(of(each_time_another))
    assert (found.runs, found.batches) == (False, False)
    assert found.reason.startswith(f"the same call returned different bits ({POOL} x ")


def test_a_batch_that_alone_is_refused_is_another_implementations() -> None:
    supports = lambda x: "too many" if len(x) > 100 else True  # noqa: E731
    assert measured(of(sound, supports=supports)).batches is None, "of its pool nothing is served"
    supports = lambda x: "too few" if len(x) < 5 else True  # noqa: E731
    found = measured(of(sound, supports=supports))
    assert found.batches is False
    assert found.reason.startswith(f"it supports a batch of {POOL} tokens, but not of 1 ")


def test_what_stands_is_not_measured_whatever_sizes_are_known() -> None:
    spec = known_contracts().contracts["causal_conv1d"]
    assert measured(oracle_impl(spec)) == Determinism(None, None, FIXED_BATCH)


def test_one_scale_for_all_rows_can_never_be_batch_invariant() -> None:
    """By the contract itself: a batch's largest number affects every row's bits."""
    found = measured(oracle_impl(known_contracts().contracts["quant_fp8"]))
    assert (found.runs, found.batches) == (True, False)


def test_where_rows_depend_on_each_other_only_runs_are_compared() -> None:
    spec = known_contracts().contracts["moe_align_block_size"]
    sizes = ModelSizes(tokens=(1, 40), more={"experts": 8, "experts_per_token": 2})
    trials = Trials(spec, torch.int32, CPU, sizes, 0)
    assert determinism_of(oracle_impl(spec), trials) == Determinism(True, None, NO_ROWS)


def variant(request: Request) -> dict[tuple[str, str], str]:
    """(op, impl id) -> why it must be disabled."""
    with request.trials() as trials:
        reasons = {role.key: variance(request, role, trials[role.calls]) for role in request.roles}
    return {key: why for key, why in reasons.items() if why}


def test_a_start_measures_what_is_right_and_only_where_that_is_asked() -> None:
    def other_alone(x: Tensor) -> Tensor:
        return silu_and_mul(x.double()).to(x.dtype) * (1 + 2e-7 * (len(x) == 1))

    wrong = of(lambda x: 2 * other_alone(x), "wrong")
    roles = [Role(of(other_alone)), Role(wrong)]
    request = Request(roles, torch.float32, CPU, SIZES, calls=0)
    acme, of_wrong = (role.key for role in roles)
    assert [*find_faults(request).objections] == [of_wrong]
    found = find_faults(replace(request, requires="VLLM_FL_REQUIRE=batch_invariant")).objections
    assert [found[key].code for key in (acme, of_wrong)] == ["FL412", "FL410"]
    why = "VLLM_FL_REQUIRE=batch_invariant is set, and it is not batch-invariant: "
    assert found[acme].reason.startswith(why) and not found[acme].ends_strict


def test_the_form_that_a_compiler_gets_is_measured_too() -> None:
    def compiled(x: Tensor) -> Tensor:
        return silu_and_mul(x) * (1 + 2e-7 * (x.shape[0] > 32))

    impl = of(sound)
    assert variant(Request([Role(impl)], torch.float32, CPU, SIZES, calls=0)) == {}
    role = Role(impl, compiled=compiled)
    found = variant(Request([role], torch.float32, CPU, SIZES, backend="eager", calls=0))
    assert found[role.key].startswith("not batch-invariant: compiled by eager: ")


REQUIRED = {"VLLM_FL_REQUIRE": "batch_invariant"}


def facts(env: dict[str, str], **fields: Any) -> EngineFacts:
    return EngineFacts(load_settings(env), "eager", dtype=torch.float32, **fields)


@pytest.mark.parametrize(
    ("env", "fields", "asks"),
    [
        ({}, {}, ""),
        (REQUIRED, {}, "VLLM_FL_REQUIRE=batch_invariant"),
        ({}, {"batch_invariant": True}, "VLLM_BATCH_INVARIANT=1"),
        (REQUIRED, {"batch_invariant": True}, "VLLM_FL_REQUIRE=batch_invariant"),
    ],
    ids=["no one", "the policy", "vLLM", "both"],
)
def test_what_nothing_measures_is_rejected_where_it_is_asked_for(
    env: dict[str, str], fields: dict[str, Any], asks: str
) -> None:
    attention = AttentionImpl("vendor.acme", "acme.Attention", BackendImplKind.VENDOR, "acme")
    aligning = oracle_impl(known_contracts().contracts["moe_align_block_size"])
    engine, specs = facts(env, **fields), known_contracts().contracts
    assert engine.wants_invariance == asks
    impls = silu("vendor.acme"), aligning, attention
    found = [unmeasured(engine, [impl], specs.get(impl.op_name)) for impl in impls]
    assert [bool(reasons) for reasons in found] == [False, bool(asks), bool(asks)]
    assert all(why.startswith(f"{asks} is set, and ") for each in found for why in each.values())


def test_without_verification_nothing_is_measured_and_so_nothing_serves() -> None:
    engine = facts(REQUIRED | {"VLLM_FL_PREFLIGHT": "run"})
    (reason,) = unmeasured(engine, [silu("vendor.acme")], None).values()
    why = "VLLM_FL_PREFLIGHT=run does not measure it"
    assert reason == f"VLLM_FL_REQUIRE=batch_invariant is set, and {why}"


def test_one_implementation_serves_all_sizes_where_bits_count() -> None:
    order = {"<=4": "vendor", "rest": "reference"}
    impls = silu("vendor.acme"), silu("reference.torch")
    manager = extended(managing(*impls, per_op_order={"silu_and_mul": order}))
    assert planning(manager).entries["silu_and_mul"].label == "vendor.acme(<=4)|reference.torch"
    settings = load_settings(REQUIRED)
    vars(settings)["policy"] = manager.policy
    plan = make_plan(manager, EngineFacts(settings, "eager"))
    assert plan.entries["silu_and_mul"].label == "reference.torch"
