"""What a worker's preflight answers, without an engine."""

from __future__ import annotations

import dataclasses
import math
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from builders import managing, planning, silu

from vllm_fl.contracts import ModelSizes
from vllm_fl.engine.facts import EngineFacts
from vllm_fl.engine.preflight import Findings
from vllm_fl.engine.trials import Request
from vllm_fl.engine.warmup import warm_counts
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.settings.loading import load_settings

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


def preflight_of(**fields: Any) -> Any:
    from vllm_fl.integration.verifying import Start

    settings = load_settings({"VLLM_FL_PREFLIGHT": "run", **fields.pop("env", {})})
    facts = EngineFacts(settings, "eager", **{"dtype": torch.bfloat16, **fields})
    return Start(facts, 1, torch.device("cpu"))


@pytest.mark.parametrize("error", [SystemExit(3), RuntimeError("boom")], ids=repr)
@pytest.mark.parametrize("where", ["attention", "ops"])
def test_whatever_a_plugin_raises_is_this_ranks_verdict(
    error: BaseException, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks wait for it, minutes, if it never comes."""
    from vllm_fl.integration import verifying

    def fails(*_: Any, **__: Any) -> Any:
        raise error

    if where == "attention":
        monkeypatch.setattr(verifying.attention, "faults", fails)
    else:
        monkeypatch.setattr(verifying, "find_faults", fails)
    preflight = preflight_of()
    verdict = preflight.verdict(planning(managing(silu("vendor.acme"))), {"mode": "eager"})
    assert verdict.rank == 1 and type(error).__name__ in verdict.failure
    assert verdict.facts == {"mode": "eager"}


def test_what_is_right_and_not_batch_invariant_is_rejected_and_not_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is measured only where somebody asks for it."""
    from vllm_fl.integration import verifying

    asked: list[bool] = []

    def finds(request: Request) -> Findings:
        asked.append(request.invariant)
        variant = {("silu_and_mul", "vendor.acme"): "not batch-invariant: 1 row"}
        faults = {("silu_and_mul", "vendor.wrong"): ("it is wrong", None)}
        return Findings(faults, variant=variant if request.invariant else {})

    monkeypatch.setattr(verifying, "find_faults", finds)
    plan = planning(managing(silu("vendor.wrong"), silu("vendor.acme"), silu("vendor.emca")))
    env = {"VLLM_FL_REQUIRE": "batch_invariant", "VLLM_FL_PREFLIGHT": "verify"}
    verdict = preflight_of(env=env).verdict(plan, {})
    assert set(verdict.faults) == {("silu_and_mul", "vendor.wrong")}
    assert verdict.rejections == {
        ("silu_and_mul", "vendor.acme"): "VLLM_FL_REQUIRE=batch_invariant, and it is not "
        "batch-invariant: 1 row"
    }
    preflight_of().verdict(plan, {})
    assert asked == [True, False]


@pytest.mark.parametrize("strict", [False, True])
def test_what_refuses_every_made_call_is_rejected_and_ends_a_strict_start(
    strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_fl.integration import verifying

    refused = {("silu_and_mul", "vendor.acme"): "1 x 640: odd"}
    monkeypatch.setattr(verifying, "find_faults", lambda *_, **__: Findings(refused=refused))
    plan = planning(managing(silu("vendor.acme"), strict=strict))
    verdict = preflight_of().verdict(plan, {})
    why = "it refuses every call of this model (1 x 640: odd)"
    assert verdict.rejections == {("silu_and_mul", "vendor.acme"): why} and not verdict.faults
    assert (why in verdict.failure) is strict


def test_an_interrupt_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_fl.integration import verifying

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(verifying, "find_faults", interrupted)
    with pytest.raises(KeyboardInterrupt):
        preflight_of().verdict(planning(managing()), {})


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_what_any_row_may_call_is_verified_once(monkeypatch: pytest.MonkeyPatch, mode: Any) -> None:
    """And in compiled mode as compiled, what a row begins with."""
    from vllm_fl.integration import verifying

    seen: list[tuple[list[str], set[str]]] = []
    tokens: dict[str, tuple[int, float]] = {}

    def noting(request: Request) -> Any:
        tokens.update({role.impl.impl_id: (role.least, role.most) for role in request.roles})
        compiled = {role.impl.impl_id for role in request.roles if role.compiled}
        seen.append(([role.impl.impl_id for role in request.roles], compiled))
        return Findings({("silu_and_mul", "vendor.acme"): ("wrong", None)})

    monkeypatch.setattr(verifying, "find_faults", noting)
    impls = silu("vendor.acme"), silu("reference.torch"), silu("default.flagos")
    order = {"<=4": ["vendor", "reference"], "<=9": "stock", "rest": "flagos"}
    manager = managing(*impls, per_op_order={"silu_and_mul": order})
    preflight = preflight_of()
    verdict = preflight.verdict(planning(manager, mode), {})
    assert verdict.failure == ""
    assert verdict.faults == {("silu_and_mul", "vendor.acme"): "wrong"}
    everyone = ["default.flagos", "vendor.acme", "reference.torch"]
    firsts = {"default.flagos", "vendor.acme"} if mode == "compiled" else set()
    assert seen == [(everyone, firsts)]
    few = (1, 4)
    assert tokens == {
        "default.flagos": (10, math.inf),
        "vendor.acme": few,
        "reference.torch": few,
    }
    # Taken out, it is out of its row, and what comes first there is verified as such.
    again = planning(manager, mode, demoted=verdict.faults)
    assert again.entries["silu_and_mul"].label == "reference.torch(<=4)|stock(<=9)|default.flagos"
    preflight.verdict(again, {})
    new = (["reference.torch"], {"reference.torch"}) if mode == "compiled" else ([], set())
    assert seen[1] == new


def warmed(plan: Any, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> dict[str, list[int]]:
    """impl id -> the token counts at which a start would have it run."""
    from vllm_fl.integration import verifying

    given: dict[str, Any] = {}

    def finds(request: Request) -> Findings:
        given.update({role.impl.impl_id: role.warm for role in request.roles if role.warm})
        return Findings()

    monkeypatch.setattr(verifying, "find_faults", finds)
    preflight_of(sizes=ModelSizes(tokens=(1, 100)), **fields).verdict(plan, {})
    return given


def test_what_serves_is_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = silu("vendor.acme", priority=9), silu("vendor.emca", priority=8)
    plan = planning(managing(first, second))
    counts = warmed(plan, monkeypatch, captured=(24, 48))
    assert counts == {"vendor.acme": warm_counts(100, sizes=(24, 48))}
    off = {"VLLM_FL_PREFLIGHT": "off"}
    assert warmed(plan, monkeypatch, env=off) == {}
    plain = silu("vendor.acme", priority=9, traceable=True)
    assert warmed(planning(managing(plain, second)), monkeypatch) == {}


def test_what_serves_some_sizes_is_warmed_up_at_those(monkeypatch: pytest.MonkeyPatch) -> None:
    order = {"<=40": "vendor:acme", "rest": "vendor:emca"}
    manager = managing(
        silu("vendor.acme"),
        silu("vendor.emca"),
        per_op_order={"silu_and_mul": order},  # type: ignore[dict-item]
    )
    counts = warmed(planning(manager), monkeypatch)
    assert set(counts) == {"vendor.acme", "vendor.emca"}
    few, many = counts["vendor.acme"], counts["vendor.emca"]
    assert {1, 2, 39, 40} <= set(few) and max(few) == 40
    assert min(many) > 40 and {56, 63, 64, 99, 100} <= set(many)


def test_what_layers_call_is_captured_where_vllm_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler's code takes the place of what it traces."""
    from vllm_fl.integration import verifying

    given: list[dict[Any, int]] = []

    def finds(request: Request) -> Findings:
        given.append({role.key: role.captured for role in request.roles if role.captured})
        return Findings()

    monkeypatch.setattr(verifying, "find_faults", finds)
    impls = silu("vendor.acme"), silu("reference.torch", traceable=True)
    orders: Any = {"silu_and_mul": {"<=4": "reference", "rest": "vendor"}}
    for device in ("cuda", "cpu"):
        for mode in ("eager", "compiled"):
            told = preflight_of(sizes=ModelSizes(tokens=(1, 2048)), captured=(1, 64, 512))
            told.device = torch.device(device)
            plan = planning(managing(*impls, per_op_order=orders), mode)  # type: ignore[arg-type]
            told.verdict(plan, {})
    both = {("silu_and_mul", name): n for name, n in (("vendor.acme", 64), ("reference.torch", 1))}
    assert given == [both, {("silu_and_mul", "vendor.acme"): 64}, {}, {}]


@pytest.mark.parametrize(
    ("how", "order", "counts"),
    [
        ("verify", ["vendor:acme"], {1, 16, 17, 256}),
        (
            "verify",
            {"<=4": "vendor:acme", "<=900": "vendor:emca", "rest": "stock"},
            {1, 4, 16, 17, 256},
        ),
        ("verify", ["stock"], set()),
        ("run", ["vendor:acme"], set()),
        ("off", ["vendor:acme"], set()),
    ],
)
def test_a_rank_asks_for_runs_of_the_loaded_model(
    how: str, order: Any, counts: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_fl.integration import verifying

    monkeypatch.setattr(verifying, "find_faults", lambda *_, **__: Findings())
    manager = managing(
        silu("vendor.acme"), silu("vendor.emca"), per_op_order={"silu_and_mul": order}
    )
    told = preflight_of(sizes=ModelSizes(tokens=(1, 2048)), env={"VLLM_FL_PREFLIGHT": how})
    assert told.verdict(planning(manager), {}).counts == counts
    small = preflight_of(sizes=ModelSizes(tokens=(1, 100)), env={"VLLM_FL_PREFLIGHT": how})
    found = small.verdict(planning(manager), {}).counts
    assert found == {min(n, 100) for n in counts}, "a model runs no more than its largest batch"


def test_what_the_model_has_no_layer_of_is_not_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody runs the model to see; of a model whose layers are not known nothing is told."""
    from vllm_fl.integration import places
    from vllm_fl.integration.verifying import planned_for_nothing

    monkeypatch.setattr(places, "installed_bindings", lambda: known_contracts().bindings)
    gelu = dataclasses.replace(silu("vendor.acme"), op_name="gelu_and_mul")
    plan = planning(managing(silu("vendor.acme"), gelu))
    without_experts = {op: plan.entries[op] for op in ("silu_and_mul", "gelu_and_mul", "rms_norm")}
    plan = dataclasses.replace(plan, entries=without_experts)
    told = planned_for_nothing(plan, preflight_of(provided={"silu_and_mul": ({},)}).facts)
    assert told == {"gelu_and_mul": "this model has no layer of it"}
    assert planned_for_nothing(plan, preflight_of().facts) == {}
