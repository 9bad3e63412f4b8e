"""Two real decoders with each plan, against stock vLLM and against transformers in float32."""

from __future__ import annotations

import prose
import pytest
from real_engines import (
    GEMMA,
    PLANS,
    SMOLLM2,
    Record,
    Scored,
    True_,
    assert_it_ran,
    own_epsilon,
    record,
)

SHORT = {(SMOLLM2, "shipped", True), (SMOLLM2, "reference", True)}
"""Model, plan and whether it is eager: the short part, in bfloat16."""

RUNS = [
    pytest.param(
        *(name, plan, eager),
        id=f"{name}-{plan}-{'eager' if eager else 'compiled'}",
        marks=() if (name, plan, eager) in SHORT else pytest.mark.slow,
    )
    for name in (SMOLLM2, GEMMA)
    for eager in (True, False)
    for plan in PLANS
    if plan != "stock"
]

THEIRS = {SMOLLM2: ("rms_norm", "silu_and_mul"), GEMMA: ("gelu_and_mul",)}
"""Model -> ops that every plan gives to one of our implementations, except that the shipped plan of
a compiled engine keeps all stock on a CPU."""


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "plan", "eager"), RUNS)
def test_a_plan_is_as_exact_as_stock(
    name: str,
    plan: str,
    eager: bool,
    dtype: str,
    scored: Scored,
    true: True_,
    record_property: Record,
) -> None:
    """In float32 it is stock except for the order of sums."""
    stock, ours = (scored(name, each, eager=eager, dtype=dtype) for each in ("stock", plan))
    engine = f"{name} {dtype} {'eager' if eager else 'compiled'}"
    record(record_property, engine, plan, ours, stock, true(name))
    assert_it_ran(ours, *THEIRS[name] if eager or plan != "shipped" else ())
    if dtype == "bfloat16":
        assert prose.problems(stock, ours, true(name)) == []
        return
    for reference, other in {"stock": prose.logps(stock), "the truth": true(name)}.items():
        found = prose.distance(prose.logps(ours), other)
        assert not prose.EXACT.exceeded(found), f"to {reference}: {found}"
    assert prose.disagreements(stock, ours, clear=0.01) == []


def test_a_wrong_norm_is_not_as_exact(scored: Scored, true: True_) -> None:
    """Control: the tests above can fail."""
    ours = scored(SMOLLM2, "shipped", label="wrong", **own_epsilon("1e-2"))
    assert_it_ran(ours, "rms_norm")
    found = prose.problems(scored(SMOLLM2, "stock"), ours, true(SMOLLM2))
    for said in ("to stock: median", "to stock: p99", "to the truth: median"):
        assert any(problem.startswith(said) for problem in found), found


@pytest.mark.slow
def test_float32_shows_what_the_rounding_of_bfloat16_hides(scored: Scored) -> None:
    """An epsilon of 1e-6 instead of 1e-5, the most common mistake."""
    stock = scored(SMOLLM2, "stock", dtype="float32")
    ours = scored(SMOLLM2, "shipped", dtype="float32", label="wrong", **own_epsilon("1e-6"))
    found = prose.distance(prose.logps(ours), prose.logps(stock))
    assert len(prose.EXACT.exceeded(found)) == 3, found
