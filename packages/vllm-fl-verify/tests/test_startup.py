"""Results of a worker's startup verification, without an engine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from builders import managing, planning, silu

from vllm_fl.contracts import ModelSizes
from vllm_fl.engine.facts import EngineFacts
from vllm_fl.integration import targets
from vllm_fl.integration.engines import Engine
from vllm_fl.integration.targets import planned_for_nothing
from vllm_fl.plugins.inspection import Objection
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.settings.loading import load_settings
from vllm_fl_verify import made_inputs
from vllm_fl_verify.preflight import Findings
from vllm_fl_verify.trials import Request

OP, KEY = "silu_and_mul", ("silu_and_mul", "vendor.acme")

Answering = Callable[..., list[Request]]


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Answering:
    """`answering(findings)`: every verification returns these; returns the list of requests."""

    def patched(found: Findings | BaseException | None = None) -> list[Request]:
        asked: list[Request] = []

        def finds(request: Request) -> Findings:
            asked.append(request)
            if isinstance(found, BaseException):
                raise found
            return found or Findings()

        monkeypatch.setattr(made_inputs, "find_faults", finds)
        return asked

    return patched


def checks_of(**fields: Any) -> Any:
    settings = load_settings({"VLLM_FL_PREFLIGHT": "run", **fields.pop("env", {})})
    facts = EngineFacts(settings, "eager", **{"dtype": torch.bfloat16, **fields})
    engine = Engine(facts, 1)
    engine.plan, engine.device = planning(managing(silu("vendor.acme"))), torch.device("cpu")
    return made_inputs.Checks(engine)


def test_what_is_right_and_not_batch_invariant_is_rejected_and_not_a_fault(
    answering: Answering,
) -> None:
    """Measured only if it is required."""
    why = "VLLM_FL_REQUIRE=batch_invariant is set, and it is not batch-invariant: 1 token"
    wrong = Objection("FL410", "it is wrong")
    rejected = Objection("FL412", why, ends_strict=False)
    asked = answering(Findings({(OP, "vendor.wrong"): wrong, KEY: rejected}))
    plan = planning(managing(silu("vendor.wrong"), silu("vendor.acme"), silu("vendor.emca")))
    env = {"VLLM_FL_REQUIRE": "batch_invariant", "VLLM_FL_PREFLIGHT": "verify"}
    assert checks_of(env=env).objections(plan) == {(OP, "vendor.wrong"): wrong, KEY: rejected}
    checks_of().objections(plan)
    assert [request.requires for request in asked] == ["VLLM_FL_REQUIRE=batch_invariant", ""]


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_what_any_row_may_call_is_verified_once(answering: Answering, mode: Any) -> None:
    """And in compiled mode, the first of each row as compiled."""
    asked = answering(Findings({KEY: Objection("FL410", "wrong")}))
    impls = silu("vendor.acme"), silu("reference.torch"), silu("default.flagos")
    order = {"<=4": ["vendor", "reference"], "<=9": "stock", "rest": "flagos"}
    manager = managing(*impls, per_op_order={OP: order})
    checks = checks_of()
    assert checks.objections(planning(manager, mode)) == {KEY: Objection("FL410", "wrong")}

    def roles(request: Request) -> dict[str, tuple[int, float, bool]]:
        return {r.impl.impl_id: (r.least, r.most, bool(r.compiled)) for r in request.roles}

    is_compiled = mode == "compiled"
    assert roles(asked[0]) == {
        "default.flagos": (10, math.inf, is_compiled),
        "vendor.acme": (1, 4, is_compiled),
        "reference.torch": (1, 4, False),
    }
    # Once disabled it leaves its row, and the row's next is verified as its first.
    again = planning(manager, mode, demoted={KEY: "wrong"})
    assert again.entries[OP].label == "reference.torch(<=4)|stock(<=9)|default.flagos"
    checks.objections(again)
    assert roles(asked[1]) == ({"reference.torch": (1, 4, True)} if is_compiled else {})


def test_implementations_are_warmed_up_at_the_sizes_they_serve(answering: Answering) -> None:
    asked = answering()

    def warmed(plan: Any, **fields: Any) -> dict[str, list[int]]:
        checks_of(sizes=ModelSizes(tokens=(1, 100)), **fields).objections(plan)
        roles = asked.pop().roles if asked else ()
        return {role.impl.impl_id: [*role.warm] for role in roles if role.warm}

    first, second = silu("vendor.acme", priority=9), silu("vendor.emca", priority=8)
    plan = planning(managing(first, second))
    warm = warmed(plan, captured=(24, 48))
    assert warm.keys() == {"vendor.acme"} and {1, 24, 48, 64, 100} <= {*warm["vendor.acme"]}
    plain = silu("vendor.acme", priority=9, traceable=True)
    assert warmed(planning(managing(plain, second))) == {}
    order: Any = {"<=40": "vendor:acme", "rest": "vendor:emca"}
    by_size = warmed(planning(managing(first, second, per_op_order={OP: order})))
    few, many = by_size["vendor.acme"], by_size["vendor.emca"]
    assert {1, 2, 40} <= set(few) and max(few) == 40
    assert min(many) > 40 and {64, 100} <= set(many)


def test_what_layers_call_is_captured_where_vllm_captures(answering: Answering) -> None:
    """A compiler's code replaces what it traces."""
    asked = answering()
    impls = silu("vendor.acme"), silu("reference.torch", traceable=True)
    orders: Any = {OP: {"<=4": "reference", "rest": "vendor"}}
    for device in ("cuda", "cpu"):
        for mode in ("eager", "compiled"):
            checks = checks_of(sizes=ModelSizes(tokens=(1, 2048)), captured=(1, 64, 512))
            checks.device = torch.device(device)
            checks.objections(planning(managing(*impls, per_op_order=orders), mode))  # type: ignore[arg-type]
    captured = [{r.impl.impl_id: r.captured for r in each.roles if r.captured} for each in asked]
    both = {"vendor.acme": 64, "reference.torch": 1}
    assert captured == [both, {"vendor.acme": 64}, {}, {}]


@pytest.mark.parametrize(
    ("how", "order", "counts"),
    [
        ("verify", ["vendor:acme"], {1, 16, 17, 256}),
        ("verify", {"<=4": "vendor", "<=900": "vendor:emca", "rest": "stock"}, {1, 4, 16, 17, 256}),
        ("verify", ["stock"], set()),
        ("run", ["vendor:acme"], set()),
        ("off", ["vendor:acme"], set()),
    ],
)
def test_a_rank_asks_for_runs_of_the_loaded_model(
    answering: Answering, how: str, order: Any, counts: set[int]
) -> None:
    answering()
    manager = managing(silu("vendor.acme"), silu("vendor.emca"), per_op_order={OP: order})
    for largest in (2048, 100):  # a model runs at most its largest batch
        sizes = ModelSizes(tokens=(1, largest))
        checks = checks_of(sizes=sizes, env={"VLLM_FL_PREFLIGHT": how})
        assert checks.counts(planning(manager)) == {min(n, largest) for n in counts}


def test_ops_in_graphs_and_attention_ask_for_no_runs() -> None:
    bindings = known_contracts().bindings
    ops = "linear", "qk_norm_rope", "reshape_and_cache", OP
    assert [op for op in ops if made_inputs._may_run(bindings[op])] == [OP]


def test_what_the_model_has_no_layer_of_is_not_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the model is not run; nothing is reported for a model with unknown layers."""
    monkeypatch.setattr(targets, "installed_bindings", lambda: known_contracts().bindings)
    plan = planning(managing(silu("vendor.acme")))
    without_experts = {op: plan.entries[op] for op in (OP, "rms_norm")}
    plan = dataclasses.replace(plan, entries=without_experts)
    assert planned_for_nothing(plan, checks_of(provided={OP: ({},)}).facts) == {}
    reasons = planned_for_nothing(plan, checks_of(provided={"rms_norm": ({},)}).facts)
    assert reasons == {OP: "this model has no layer for it"}
    assert planned_for_nothing(plan, checks_of().facts) == {}


@pytest.mark.parametrize("op", sorted(known_contracts().contracts))
def test_a_made_layer_provides_what_the_contract_takes_from_it(op: str) -> None:
    spec = known_contracts().contracts[op]
    sample = next(iter(spec.samples(torch.float32, torch.device("cpu"))))
    given = dict(zip(spec.parameters, sample.args, strict=True))
    provided = {name: given[name] for name in spec.from_layer}
    layer = made_inputs.layer_for(spec, provided)
    for name, read in spec.from_layer.items():
        got, want = read(layer), provided[name]
        same = torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want
        assert same, name


@pytest.mark.parametrize(
    ("backend", "device", "lowered"),
    [
        ("", "cpu", "inductor"),
        ("inductor", "cuda", "inductor"),
        ("inductor", "meta", "aot_eager"),
        ("eager", "cpu", "aot_eager"),
    ],
)
def test_a_form_is_lowered_as_the_engine_lowers_its_model(
    backend: str, device: str, lowered: str
) -> None:
    facts = EngineFacts(load_settings({}), "compiled", compile_backend=backend)
    assert made_inputs.lowering(facts, torch.device(device)) == lowered
