"""The kit is worth what it catches: every wrong implementation fails it, the sound ones pass."""

from __future__ import annotations

from collections import Counter

import pytest
from mutants import CAUGHT_BY, MUTANTS, OPS, Mutant, sound
from oracle_mutants import CHANGES, oracle_impl, oracle_mutants

from vllm_fl.contracts import OpSpec, contracts
from vllm_fl.plugins.types import OpImpl
from vllm_fl.testing import CHECKS, failures

pytestmark = pytest.mark.slow

FAMILIES = Counter(mutant.family for mutant in MUTANTS)


@pytest.mark.parametrize("op", OPS)
def test_the_sound_implementation_passes(op: str) -> None:
    assert list(failures(sound(op))) == []


@pytest.mark.parametrize("op", OPS)
def test_the_sound_implementation_passes_where_a_compiler_looks_inside(op: str) -> None:
    impl = sound(op, traceable=True, supports=None)
    assert list(failures(impl, without=CHECKS.keys() - {"tracing"})) == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_every_mutant_fails(mutant: Mutant) -> None:
    seeing = CAUGHT_BY.get(mutant.family, {"values"})
    found = next(failures(mutant.impl(), without=CHECKS.keys() - seeing, deadline=2.0), None)
    assert found is not None, f"survives: {mutant}"


@pytest.mark.parametrize("spec", contracts().values(), ids=lambda spec: spec.name)
def test_the_oracle_itself_passes(spec: OpSpec) -> None:
    assert list(failures(oracle_impl(spec), without=CHECKS.keys() - {"values"})) == []


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, id=f"{spec.name}: {what}")
        for spec in contracts().values()
        for what, mutant in oracle_mutants(spec)
    ],
)
def test_every_mutant_of_an_oracle_fails(mutant: OpImpl) -> None:
    """No contract has to bring these: whoever adds one adds them."""
    assert next(failures(mutant, without=CHECKS.keys() - {"values"}), None) is not None


def test_every_contract_has_mutants_of_its_results_arguments_and_options() -> None:
    for spec in contracts().values():
        names = [what for what, _ in oracle_mutants(spec)]
        assert len(names) > len(CHANGES) and len(set(names)) == len(names)
        assert any(what.endswith("overwritten") for what in names)


def test_there_are_enough_mutants_of_each_family() -> None:
    print("\n".join(f"{count:3} {family}" for family, count in FAMILIES.items()))
    assert len(MUTANTS) >= 40
    assert min(FAMILIES.values()) >= 3
