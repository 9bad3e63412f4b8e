"""Each wrong kernel is seen by what the corpus says, and docs/trust.md says no more than that."""

from __future__ import annotations

from collections import Counter

import pytest

from vllm_fl.dispatch.types import BackendImplKind, OpImpl

from . import judging, right
from .corpus import KINDS, Wrong, corpus
from .expected import check_of, is_named_at_start
from .not_yet import KIT, START
from .page import PAGE, written
from .verdict import faults_at_start

EVERY = list(corpus().values())
OPS = sorted({wrong.op for wrong in EVERY})
CHECKED = [wrong for wrong in EVERY if check_of(wrong) not in ("", "preflight")]


@pytest.mark.parametrize("wrong", EVERY, ids=lambda wrong: wrong.name)
def test_start(wrong: Wrong) -> None:
    verdict = judging.at_start(wrong.name)
    named = verdict.outcome == "named"
    if named and not is_named_at_start(wrong):
        pytest.fail(f"start sees it now: say so in the corpus, and in docs ({verdict.reason})")
    assert named == is_named_at_start(wrong), f"start does not see it: {verdict}"


@pytest.mark.parametrize("wrong", CHECKED, ids=lambda wrong: wrong.name)
def test_kit(wrong: Wrong) -> None:
    """The rest of the kit, which takes minutes, is run by `python -m wrong_kernels`."""
    verdict = judging.by_kit(wrong.name, check_of(wrong))
    assert verdict.outcome == "named", f"the kit does not see it: {verdict}"


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("op", OPS)
def test_start_passes_the_right_kernel(op: str, mode: str) -> None:
    like = next(w for w in EVERY if w.op == op and w.mode == mode and not w.apart)
    impl = OpImpl(
        op,
        "vendor.right",
        BackendImplKind.VENDOR,
        getattr(right, op),
        "right",
        traceable=mode == "compiled",
    )
    assert faults_at_start([impl], like) == {}


def test_what_is_not_seen_yet_is_a_wrong_kernel_that_should_be() -> None:
    assert not {name for name in START if not corpus()[name].start}
    assert not {name for name in KIT if not corpus()[name].kit}


def test_there_are_enough_of_each_kind_for_each_op() -> None:
    assert len(EVERY) >= 80
    assert Counter(wrong.kind for wrong in EVERY).keys() == KINDS.keys()
    assert min(Counter(wrong.kind for wrong in EVERY).values()) >= 10
    assert min(Counter(wrong.op for wrong in EVERY).values()) >= 10


def test_the_page_says_what_is_true() -> None:
    assert written(PAGE.read_text()) == PAGE.read_text(), "run python -m wrong_kernels --write"
