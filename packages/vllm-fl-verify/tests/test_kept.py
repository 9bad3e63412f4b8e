"""Startups with a kept verdict: what they repeat, and what makes them verify everything."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from builders import managing, planning, silu
from of_acme import silu_and_mul
from torch import Tensor

from vllm_fl.contracts import ModelSizes
from vllm_fl.engine.facts import EngineFacts
from vllm_fl.integration import engines
from vllm_fl.integration.engines import Engine
from vllm_fl.plugins.inspection import FAILED, VERIFIED_BEFORE, Moment, Objection
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.types import OpImpl
from vllm_fl.settings.loading import load_settings
from vllm_fl_verify import kept, loaded, plugin, trials
from vllm_fl_verify.batches import POOL
from vllm_fl_verify.made_inputs import Checks, checks_of
from vllm_fl_verify.verdicts import KeptVerdict, hashed, verdict_folder, write_verdict

OP, KEY = "silu_and_mul", ("silu_and_mul", "vendor.acme")
WRONG = Objection(FAILED, "it is incorrect")

calls: list[int] = []
"""Tokens of each call."""


def sound(x: Tensor) -> Tensor:
    calls.append(len(x))
    return silu_and_mul(x)


def wrong(x: Tensor) -> Tensor:
    return sound(x) * 1.1


ACME, SECOND = silu("vendor.acme", fn=sound, priority=9), silu("vendor.second", fn=sound)


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(trials, "CALLS", 0)
    monkeypatch.setattr(engines, "exchange", lambda what, mine, failure="": [mine])
    monkeypatch.setattr(kept, "verdict_parts", lambda _, request: parts_of(request))


def parts_of(request: Any) -> dict[str, str]:
    return {"tried": hashed([role.name for role in request.roles])}


def start(*impls: OpImpl, serves: bool = True, **env: str) -> tuple[Checks, dict[Any, Any]]:
    """Verify a plan of these implementations, with rounds as in `settle`. Return the engine's
    `Checks` and all objections."""
    sizes = ModelSizes(hidden=256, intermediate=64, tokens=(1, 64))
    facts = EngineFacts(load_settings(env), "eager", torch.bfloat16, sizes)
    engine = Engine(facts, 0)
    engine.device, out = torch.device("cpu"), {}
    while True:
        calls.clear()
        disabled = {key: each.reason for key, each in out.items()}
        engine.plan = planning(managing(*impls), demoted=disabled)
        found = checks_of(engine).objections(engine.plan)
        if not found:
            break
        out.update(found)
    if serves:
        engine.serve()
    return checks_of(engine), out


def is_kept(checks: Checks) -> bool:
    return VERIFIED_BEFORE in checks.limits(checks.engine.plan)


def test_a_second_start_repeats_a_small_part_with_other_sizes() -> None:
    checks, _ = start(ACME)
    full = len(calls)
    assert not is_kept(checks)
    sizes = set()
    for _ in range(4):
        checks, out = start(ACME)
        assert is_kept(checks) and not out and len(calls) < full / 4
        # The first call is drawn; the other ones are the warm-up, as in the first startup.
        sizes.add(calls[0])
        warm = {n for role in checks._verified.values() for n in role.warm}
        assert warm <= set(calls)
    assert len(sizes) > 1


FULL, RUN, OFF = ({"VLLM_FL_PREFLIGHT": how} for how in ("full", "run", "off"))
INVARIANT = {"VLLM_FL_REQUIRE": "batch_invariant"}
"""Batch invariance is measured in each startup."""


@pytest.mark.parametrize(
    ("first", "second", "is_used"),
    [
        *(({}, how, False) for how in (FULL, RUN, OFF, INVARIANT)),
        *((how, {}, how is FULL) for how in (FULL, RUN, {"serves": False})),
        (INVARIANT, INVARIANT, False),
    ],
)
def test_a_verdict_is_kept_and_used_only_after_such_startups(
    first: Any, second: Any, is_used: bool
) -> None:
    start(ACME, **first)
    assert is_kept(start(ACME, **second)[0]) is is_used


def test_all_ranks_must_have_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    start(ACME)
    without: list[Any] = []

    def exchange(what: str, mine: Any, failure: str = "") -> list[Any]:
        without.append(mine)
        return [mine, frozenset()]

    monkeypatch.setattr(engines, "exchange", exchange)
    assert not is_kept(start(ACME)[0])
    assert without == [frozenset({"silu_and_mul=vendor.acme, 1-inf, warm"})]


def test_a_faulty_implementation_is_verified_again_in_full() -> None:
    bad = dataclasses.replace(ACME, fn=wrong)
    for is_first in (True, False):
        checks, out = start(bad, SECOND)
        assert list(out) == [KEY] and "it is incorrect" in out[KEY].reason
        roles = {role.impl.impl_id: role.kept for role in checks._verified.values()}
        assert roles["vendor.acme"] is False and roles["vendor.second"] is not is_first
        assert is_kept(checks) is not is_first


def test_a_fault_in_the_small_part_voids_the_verdict() -> None:
    """And the implementations that had passed it are verified in full in the same startup."""
    start(ACME, SECOND)
    assert is_kept(start(ACME, SECOND)[0])
    checks, out = start(dataclasses.replace(ACME, fn=wrong), SECOND)
    assert list(out) == [KEY] and checks.verdicts.is_void
    assert [role.kept for role in checks._verified.values() if role.impl == SECOND][-1] is False
    assert not is_kept(start(ACME, SECOND)[0]) and not is_kept(start(ACME, SECOND)[0])


def test_a_fault_of_another_rank_voids_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    start(ACME)
    monkeypatch.setattr(engines, "exchange", lambda what, mine, failure="": [mine, None])
    checks, _ = start(ACME, VLLM_FL_STRICT="1")
    assert checks.verdicts.is_void and not is_kept(checks)


@pytest.mark.parametrize("moment", [Moment.LOADED, Moment.CACHED, Moment.UPDATED])
def test_a_later_fault_voids_the_verdict_also_for_an_engine_that_writes_later(
    moment: Moment, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(ACME)
    checks, _ = start(ACME)
    for name in ("compare_loaded", "compare_with_cache", "compare_again"):
        monkeypatch.setattr(loaded, name, lambda engine: {KEY: WRONG})
    monkeypatch.setattr(loaded, "compare_attention", lambda engine: None)
    assert plugin.inspect_plan(checks.engine, moment) == {KEY: WRONG}
    names = ["silu_and_mul=vendor.acme, 1-inf, warm"]
    write_verdict(KeptVerdict({"tried": hashed(names)}, frozenset(names)))
    assert not is_kept(start(ACME)[0])


def test_an_implementation_without_a_call_of_the_model_is_no_fault() -> None:
    start(ACME)
    checks, _ = start(ACME)
    checks.verdicts.refute({KEY: Objection("FL412", "it supports no call of this model")})
    assert is_kept(start(ACME)[0])


def test_other_choices_by_timing_verify_everything() -> None:
    tiles = {"64": 16}
    tuned = dataclasses.replace(ACME, choices=lambda: dict(tiles))
    start(tuned)
    assert is_kept(start(tuned)[0])
    tiles["32"] = 8  # a call that the first startup did not make
    assert is_kept(start(tuned)[0])
    tiles["64"] = 32
    assert not is_kept(start(tuned)[0])


@pytest.mark.parametrize("spoil", [lambda f: f.write_text(""), lambda f: f.chmod(0o777)])
def test_a_file_that_cannot_be_trusted_verifies_everything(
    spoil: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    start(ACME)
    (file,) = (verdict_folder() or Path()).iterdir()
    spoil(file)
    assert not is_kept(start(ACME)[0])
    assert "A kept verdict is ignored" in caplog.text
    assert is_kept(start(ACME)[0])


def test_an_unknown_key_verifies_everything(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> dict[str, str]:
        raise AttributeError("no compute_hash")

    start(ACME)
    monkeypatch.setattr(kept, "verdict_parts", fails)
    assert not is_kept(start(ACME)[0])
    assert "their key is unknown: AttributeError: no compute_hash" in caplog.text


@pytest.mark.parametrize(("tokens", "largest"), [((1, 8192), 8192), ((10, 64), 64), ((3, 3), 3)])
def test_drawn_sizes_are_those_of_the_implementation(tokens: Any, largest: int) -> None:
    spec, sizes = known_contracts().contracts[OP], ModelSizes(tokens=tokens)
    of_role = trials.Trials(spec, torch.bfloat16, torch.device("cpu"), sizes, 1)
    drawn = of_role.drawn_counts(number=500)
    assert tokens[0] <= min(drawn) <= max(drawn) <= largest
    assert max(drawn) - min(drawn) >= 0.8 * (largest - tokens[0])
    assert max(of_role.drawn_counts(4, number=50)) <= max(4, tokens[0])


@pytest.mark.parametrize(("pool", "is_kept"), [(POOL, False), (trials.KEPT_POOL, True)])
def test_a_kept_verdict_needs_no_large_values(pool: int, is_kept: bool) -> None:
    spec, sizes = known_contracts().contracts[OP], ModelSizes(intermediate=64, tokens=(1, 300))
    fixed = spec, torch.bfloat16, torch.device("cpu"), sizes, 1
    ordinary, large = trials.Trials(*fixed, pool=pool).forms[0].samples
    assert (large is ordinary) == is_kept
