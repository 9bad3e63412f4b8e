"""The kit is worth what it catches: every wrong implementation fails it, the sound ones pass."""

from __future__ import annotations

from collections import Counter

import pytest
from mutants import CAUGHT_BY, MUTANTS, OPS, Mutant, sound

from vllm_fl.testing import CHECKS, failures

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


def test_there_are_enough_mutants_of_each_family() -> None:
    print("\n".join(f"{count:3} {family}" for family, count in FAMILIES.items()))
    assert len(MUTANTS) >= 40
    assert min(FAMILIES.values()) >= 3
