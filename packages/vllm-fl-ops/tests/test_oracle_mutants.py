"""The kit detects mistakes: an oracle passes it, and an oracle with a mistake fails."""

from __future__ import annotations

import pytest
from oracle_mutants import oracle_impl, oracle_mutants

from vllm_fl.contracts import OpSpec
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.types import OpImpl
from vllm_fl_tools.testing import CHECKS, failures

pytestmark = pytest.mark.slow

BUT_VALUES = CHECKS.keys() - {"values"}


@pytest.mark.parametrize("spec", known_contracts().contracts.values(), ids=lambda spec: spec.name)
def test_the_oracle_itself_passes(spec: OpSpec) -> None:
    assert list(failures(oracle_impl(spec), without=BUT_VALUES)) == []


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, id=f"{spec.name}: {what}")
        for spec in known_contracts().contracts.values()
        for what, mutant in oracle_mutants(spec)
    ],
)
def test_every_mutant_of_an_oracle_fails(mutant: OpImpl) -> None:
    """Mutants are derived automatically for every contract."""
    assert next(failures(mutant, without=BUT_VALUES), None) is not None
