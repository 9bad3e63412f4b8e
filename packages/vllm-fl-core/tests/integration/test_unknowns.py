"""Several unknowns that stand for one number of tokens: what we put into a graph joins none."""

from __future__ import annotations

from collections.abc import Callable
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
from torch.fx.passes.split_module import split_module

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


def test_results_of_two_unknowns_have_them_again() -> None:
    graph = Graph()
    x, residual = (graph.input(torch.zeros(TOKENS, 4), 0) for _ in "ab")
    with graph.mode:
        sums = under_one(lambda a, b: [a + b] * 2, [x, residual], (x, residual))
        for result, was in zip(sums, (x, residual), strict=True):
            result.view(was.shape[0], 2, 2)
    assert not graph.unknowns.guards and not graph.unknowns.replacements


def test_one_unknown_is_left_as_it_is() -> None:
    graph = Graph()
    x = graph.input(torch.zeros(TOKENS, 4), 0)
    doubled = x.new_zeros(2 * x.shape[0])
    values = [x, doubled, None]
    assert all(a is b for a, b in zip(given_to(values, x), values, strict=True))


def test_the_values_are_those_of_the_memory_as_it_is() -> None:
    x, positions = torch.zeros(TOKENS, 4), torch.arange(2 * TOKENS).reshape(2, TOKENS)
    assert torch.equal(given_to([x, positions], x)[1], positions)


def test_a_stride_of_two_unknowns_together_is_refused() -> None:
    graph = Graph()
    x, many = graph.input(torch.zeros(TOKENS, 4), 0), graph.input(torch.zeros(2, 5, 7), 0, 1, 2)
    with graph.mode, pytest.raises(ValueError, match="which is no unknown of its own"):
        given_to([x, many], x)


def test_a_result_of_an_unknown_that_no_argument_has_is_refused() -> None:
    graph = Graph()
    x, positions, other = (graph.input(torch.zeros(TOKENS), 0) for _ in "abc")
    with graph.mode, pytest.raises(ValueError, match="of unknowns that no argument has"):
        given_to([x, positions], other)


def test_supports_is_asked_of_tensors_with_numbers() -> None:
    graph = Graph()
    x, positions = graph.input(torch.zeros(TOKENS, 4), 0), graph.input(torch.zeros(TOKENS), 0)
    halves = x[:, :2]
    like, counts, half, size, flag = as_numbers([x, positions, halves, x.shape[0], True])
    assert len(like) == len(counts) == size and flag is True
    assert like.shape == (size, 4) and type(size) is int and size > 1
    assert half.stride() == (4, 1) and half.dtype == x.dtype and half.device == x.device
    assert not graph.unknowns.guards and not graph.unknowns.replacements


@pytest.mark.parametrize(("joins", "inputs"), [(lambda a, b: bool(a == b), 3), (lambda a, b: a, 4)])
def test_what_is_joined_is_one_input_less_when_a_graph_is_split_again(
    joins: Callable[[Any, Any], Any], inputs: int
) -> None:
    """Why it matters: vLLM stores a model's graph, splits it anew, and finds what it compiled."""
    graphs: list[torch.fx.GraphModule] = []

    def kept(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    x, positions = torch.zeros(TOKENS, 4), torch.arange(TOKENS)
    for each in (x, positions):
        torch._dynamo.mark_dynamic(each, 0)
    torch._dynamo.reset()
    torch.compile(lambda x, at: (x + 1, at + 1), backend=kept, fullgraph=True)(x, positions)
    values = [n.meta["example_value"] for n in graphs[0].graph.nodes if n.op == "placeholder"]
    joins(*(value for value in values if isinstance(value, torch.SymInt)))
    split = split_module(graphs[0], None, lambda node: 0)  # type: ignore[arg-type]
    (part,) = (part for _, part in split.named_children())
    assert len([n for n in part.graph.nodes if n.op == "placeholder"]) == inputs
