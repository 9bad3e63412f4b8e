"""Several symbolic sizes for one number of tokens: what we put into a graph unifies none."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from vllm_fl.integration.graphs.symbolic_sizes import under_one

TOKENS = 12


class Graph:
    """Inputs of one graph; each marked dimension has its own symbol."""

    def __init__(self) -> None:
        self.unknowns = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.unknowns)

    def input(self, tensor: torch.Tensor, *marked: int) -> Any:
        kinds = (
            DimDynamic.DYNAMIC if n in marked else DimDynamic.STATIC for n in range(tensor.ndim)
        )
        return self.mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext([*kinds]))


def test_two_unknowns_are_passed_as_one_and_results_keep_theirs() -> None:
    """Later code uses the result's symbol: a view by another symbol would unify the two."""
    graph = Graph()
    x, positions = graph.input(torch.zeros(TOKENS, 4), 0), graph.input(torch.zeros(3, TOKENS), 1)
    table = graph.input(torch.zeros(40, 4))

    def code(same: Any, rows: Any, whole: Any, number: int) -> Any:
        assert same is x and whole is table and number == 5
        assert rows.shape == (3, x.shape[0]) and rows.stride() == (x.shape[0], 1)
        return None, rows[0].unsqueeze(1) * same, rows + 1

    with graph.mode:
        _, product, more = under_one(code, [x, positions, table, 5], (None, x, positions))
        product.view(x.shape[0], 2, 2)
        more.view(3, positions.shape[1])
    assert not graph.unknowns.guards and not graph.unknowns.replacements


def test_ambiguous_unknowns_raise() -> None:
    graph = Graph()
    x, many = graph.input(torch.zeros(TOKENS, 4), 0), graph.input(torch.zeros(2, 5, 7), 0, 1, 2)
    at, other = (graph.input(torch.zeros(TOKENS), 0) for _ in "ab")
    with graph.mode, pytest.raises(ValueError, match="is not a single symbol"):
        under_one(lambda *given: given[0], [x, many], x)
    with graph.mode, pytest.raises(ValueError, match="has symbols that no argument has"):
        under_one(lambda *given: given[0], [x, at], other)
