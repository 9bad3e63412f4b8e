"""Several unknowns that stand for one number of tokens: what we put into a graph joins none."""

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

from vllm_fl.integration.unknowns import as_numbers, under_one

TOKENS = 12


class Graph:
    """Inputs of one graph: each dimension that is marked has an unknown of its own."""

    def __init__(self) -> None:
        self.unknowns = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.unknowns)

    def input(self, tensor: torch.Tensor, *marked: int) -> Any:
        sizes = [
            DimDynamic.DYNAMIC if dim in marked else DimDynamic.STATIC for dim in range(tensor.ndim)
        ]
        return self.mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(sizes))


def given_to(values: list[Any], results: Any) -> list[Any]:
    """What code in an operator's place gets; it returns what the operator returns."""
    got: list[Any] = []
    under_one(lambda *given: got.extend(given) or results, values, results)
    return got


def test_arguments_with_two_unknowns_are_given_one_and_none_is_joined() -> None:
    graph = Graph()
    x, positions = graph.input(torch.zeros(TOKENS, 4), 0), graph.input(torch.zeros(3, TOKENS), 1)
    table = graph.input(torch.zeros(40, 4))
    assert x.shape[0].node.expr != positions.shape[1].node.expr
    with graph.mode:
        same, rows, whole, number = given_to([x, positions, table, 5], x)
        (rows[0].unsqueeze(1) * same).sum()
    assert same is x and whole is table and number == 5
    assert rows.shape == (3, x.shape[0]) and rows.stride() == (x.shape[0], 1)
    assert not graph.unknowns.guards and not graph.unknowns.replacements


@pytest.mark.parametrize("first", ["x", "positions"])
def test_results_keep_the_unknown_that_they_have_in_the_graph(first: str) -> None:
    """What follows there has it: a view of a result by another one would join the two."""
    graph = Graph()
    x, positions = graph.input(torch.zeros(TOKENS, 4), 0), graph.input(torch.zeros(TOKENS), 0)
    values = [x, positions] if first == "x" else [positions, x]

    def code(*given: Any) -> tuple[None, Any]:
        a, b = given if first == "x" else given[::-1]
        return None, a * b.unsqueeze(1)

    with graph.mode:
        _, result = under_one(code, values, (None, x))
        result.view(x.shape[0], 2, 2)
    assert result.shape[0].node.expr == x.shape[0].node.expr
    assert not graph.unknowns.guards and not graph.unknowns.replacements


def test_supports_is_asked_of_tensors_with_numbers() -> None:
    graph = Graph()
    x, positions = graph.input(torch.zeros(TOKENS, 4), 0), graph.input(torch.zeros(TOKENS), 0)
    halves = x[:, :2]
    like, counts, half, size, flag = as_numbers([x, positions, halves, x.shape[0], True])
    assert len(like) == len(counts) == size and flag is True
    assert like.shape == (size, 4) and type(size) is int and size > 1
    assert half.stride() == (4, 1) and half.dtype == x.dtype and half.device == x.device
    assert not graph.unknowns.guards and not graph.unknowns.replacements
