"""Each wrong kernel is found as recorded in the corpus, and the pages match the corpus."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_on_cpu import captured

from vllm_fl.plugins.registry import known_contracts

from . import judging, right
from .chosen import AT_START, BY_KIT, chosen
from .corpus import GELU, KINDS, NORM, ROTARY, SILU, UNUSUAL, Wrong, corpus, kernels
from .page import FOLDER, pages, seen

NAME = attrgetter("name")
RIGHT = (SILU, NORM, ROTARY, "quant_fp8", "merge_attn_states")
"""Ops for which the default run gives the kit a correct kernel."""
EVERY = list(corpus().values())
UNUSUAL_ONES = [each for each in kernels().values() if each.kind == UNUSUAL]
IN_DEFAULT_RUN_LAST = sorted(EVERY, key=lambda wrong: wrong.name in chosen())
LIKE = {(wrong.op, wrong.mode): wrong for wrong in IN_DEFAULT_RUN_LAST if not wrong.apart}
"""A kernel of each op and mode."""
LIKE_BY_OP = {wrong.op: wrong for wrong in LIKE.values()}
CHECKED = [w for w in EVERY if w.kit not in ("", "preflight") or w.name in BY_KIT.values()]
GRAPHED = [wrong for wrong in EVERY if seen()[wrong.name].get("graph") == "named"]


def some(
    wrongs: Iterable[Wrong], default: Collection[str], *, name: Callable[[Wrong], str] = NAME
) -> Any:
    """Make one case per kernel; cases outside the default run are slow."""
    return pytest.mark.parametrize(
        "wrong",
        [
            pytest.param(w, id=name(w), marks=() if w.name in default else pytest.mark.slow)
            for w in wrongs
        ],
    )


@pytest.fixture(scope="session", autouse=True)
def shared(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Share verdicts between workers, because many kernels are judged in one process."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = tmp_path_factory.getbasetemp().parent / "wrong-kernels"
        folder.mkdir(exist_ok=True)
        judging.shared_in = folder


@some(EVERY, chosen())
def test_start(wrong: Wrong) -> None:
    verdict = judging.at_start(wrong.name)
    named = verdict.outcome == "named"
    if named and not wrong.start:
        pytest.fail(f"startup finds it now: update the corpus and docs ({verdict.reason})")
    assert named == wrong.start, f"startup does not find it: {verdict}"


@some(CHECKED, chosen())
def test_kit(wrong: Wrong) -> None:
    """Other checks of the kit take minutes; `python -m wrong_kernels` runs them."""
    verdict = judging.by_kit(wrong.name, wrong.kit)
    assert verdict.outcome == "named", f"the kit does not find it: {verdict}"


@some(GRAPHED, AT_START.values())
def test_a_graph(wrong: Wrong) -> None:
    verdict = judging.in_a_graph(wrong.name)
    assert verdict.outcome == "named", f"a captured graph does not show it: {verdict}"


@pytest.mark.parametrize("check", AT_START)
def test_no_other_check_names_it(check: str) -> None:
    assert judging.at_start_without(check, AT_START[check]).outcome == "passes"


@some(LIKE.values(), chosen(), name=lambda wrong: f"{wrong.op}-{wrong.mode}")
def test_start_passes_the_right_kernel(wrong: Wrong) -> None:
    assert judging.right_at_start(wrong.name).outcome == "passes"


@some(UNUSUAL_ONES, {"over_both_arguments", "rows_backwards"})
def test_start_passes_an_unusual_kernel(wrong: Wrong) -> None:
    assert judging.at_start(wrong.name).outcome == "passes"


@some(LIKE_BY_OP.values(), {LIKE_BY_OP[op].name for op in RIGHT}, name=lambda wrong: wrong.op)
def test_kit_passes_the_right_kernel(wrong: Wrong) -> None:
    """Run only the checks that find most of the wrong kernels."""
    verdict = judging.right_by_kit(wrong.name, "values", "bad_inputs")
    assert verdict.outcome == "passes", verdict


IN_A_GRAPH = [wrong for wrong in EVERY if wrong.kind == "graph" and wrong.name != "synchronises"]


def _call(op: str, times: float) -> list[Any]:
    """Arguments of an op with 8 tokens and values scaled by `times`."""
    rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * times
    if op == "rms_norm":
        return [rows, None, torch.full((64,), times), 1e-6]
    if op != "rotary_embedding":
        return [rows]
    angle = torch.arange(64.0).outer(torch.ones(8))
    positions = torch.arange(1, 9) * int(times) % 61
    return [rows.view(8, 4, 16), None, angle.cos(), angle.sin(), positions]


@pytest.mark.parametrize("wrong", IN_A_GRAPH, ids=lambda wrong: wrong.name)
def test_it_is_wrong_in_a_graph(wrong: Wrong) -> None:
    """Also for kernels that the graphs of startup do not show."""
    fn, exact = wrong.impl().fn, getattr(right, wrong.op)
    graphs = []
    for _ in range(2):  # two layers
        args = _call(wrong.op, 1.0)
        assert _same(fn(*args), exact(*args))
        graphs.append((*captured(lambda args=args: fn(*args), torch.device("cpu")), args))
    (_, got, args), _ = graphs
    for memory, value in zip(args, _call(wrong.op, 700.0), strict=True):
        if isinstance(memory, torch.Tensor):
            memory.copy_(value)
    for replay, _, _ in graphs:
        for _ in range(5):
            replay()
    assert not _same(got, exact(*args))


def _same(one: Any, other: Any) -> bool:
    pairs = zip(*(got if isinstance(got, tuple) else (got,) for got in (one, other)), strict=True)
    return all(a is b is None or torch.allclose(a, b) for a, b in pairs)


def test_there_are_enough_of_each_kind_and_for_each_op() -> None:
    assert len(EVERY) >= 400
    assert len(UNUSUAL_ONES) >= 40
    assert Counter(wrong.kind for wrong in EVERY).keys() == KINDS.keys()
    assert min(Counter(wrong.kind for wrong in EVERY).values()) >= 6
    by_op = Counter(wrong.op for wrong in EVERY)
    assert by_op.keys() == known_contracts().contracts.keys()
    assert min(by_op.values()) >= 2
    assert min(by_op[op] for op in (SILU, GELU, NORM, ROTARY)) >= 20


def test_what_was_seen_is_of_these_kernels() -> None:
    """`python -m wrong_kernels` records the columns that take minutes in seen.json."""
    assert list(seen()) == list(corpus()), "run python -m wrong_kernels --keep NAME…"
    for name, columns in seen().items():
        wrong = corpus()[name]
        assert ("graph" in columns) == judging.is_captured(wrong), name
        served = {"live", "shadow", "served"}
        assert columns.keys() & served == (served if judging.serves(wrong) else set()), name


PAGES = pages()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_pages_say_what_is_true(page: Path) -> None:
    assert PAGES[page] == page.read_text(), "run python -m wrong_kernels --write"


def test_no_page_is_of_a_kind_that_is_gone() -> None:
    assert {*FOLDER.glob("*.md")} <= PAGES.keys()
