"""Products with what stands behind them, found in graphs as Inductor hands them to passes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.nn.functional import gelu, linear, silu

from vllm_fl.plugins.registry import known_contracts

pytest.importorskip("vllm", reason="the binding asks for its platform")

import vllm.platforms
from transformers import CONFIG_MAPPING
from vllm.transformers_utils.configs.chatglm import ChatGLMConfig

BINDING = known_contracts().bindings["linear_silu_and_mul"]
(PLACE,) = BINDING.places
D = 32
Function = Callable[..., Tensor]


class Finding(CustomGraphPass):
    """A pass that notes what the place finds, and changes nothing."""

    def __init__(self) -> None:
        self.found: list[tuple[Any, ...]] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        before = str(graph)
        given = graph.find_nodes(op="placeholder")
        for node in graph.nodes:
            if str(node.target) in PLACE.operators:
                args = PLACE.find(node)
                if args is not None:
                    assert all(arg in given for arg in args)
                    self.found.append(tuple(arg.meta["val"].shape for arg in args))
        assert str(graph) == before

    def uuid(self) -> Any:
        return None


def found(function: Function, *args: Tensor, dynamic: bool = False, **options: Any) -> list[Any]:
    """The shapes of what is found in the graph of a function."""
    finding = Finding()
    torch._dynamo.reset()
    if dynamic:
        torch._dynamo.mark_dynamic(args[0], 0)
    options |= {"force_disable_caches": True, "post_grad_custom_post_pass": finding}
    with torch._inductor.config.patch(**options), torch.no_grad():
        torch.compile(function, fullgraph=True)(*args)
    return finding.found


def made(rows: int = 5, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 48, dtype=dtype), torch.randn(2 * D, 48, dtype=dtype)


def as_vllm(x: Tensor, weight: Tensor) -> Tensor:
    """`MergedColumnParallelLinear`, and `SiluAndMul.forward_native`."""
    y = linear(x, weight)
    d = y.shape[-1] // 2
    return silu(y[..., :d]) * y[..., d:]


def other_order(x: Tensor, weight: Tensor) -> Tensor:
    y = linear(x, weight)
    return y[:, D:] * silu(y[:, :D])


def in_chunks(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = linear(x, weight).chunk(2, dim=-1)
    return silu(gate) * up


def in_pieces(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = linear(x, weight).split([D, D], dim=1)
    return up * silu(gate)


def spelt(x: Tensor, weight: Tensor) -> Tensor:
    """One row's product, as Inductor takes it apart for a single size on a GPU."""
    y = (x.unsqueeze(2) * weight.t().unsqueeze(0)).sum(dim=1)
    return silu(y[:, :D]) * y[:, D:]


RIGHT = [as_vllm, other_order, in_chunks, in_pieces]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize("function", RIGHT)
def test_it_is_found_in_the_graph_of_a_compiler(
    function: Function, dynamic: bool, dtype: torch.dtype
) -> None:
    args = made(dtype=dtype)
    ((of_x, of_weight),) = found(function, *args, dynamic=dynamic)
    assert (of_x[1], of_weight) == (48, (2 * D, 48)) and isinstance(of_x[0], int) is not dynamic
    torch.testing.assert_close(PLACE.native(*args), function(*args))


@pytest.mark.parametrize("function", [as_vllm, in_pieces, spelt])
def test_it_is_found_where_a_graph_is_of_one_row(function: Function) -> None:
    args = made(1, torch.float32)
    assert len(found(function, *args)) == 1
    torch.testing.assert_close(PLACE.native(*args), function(*args))


@pytest.mark.parametrize("function", RIGHT)
def test_it_is_found_where_silu_is_one_operator(function: Function) -> None:
    graph = torch.fx.experimental.proxy_tensor.make_fx(function, tracing_mode="fake")(*made()).graph
    graph.eliminate_dead_code()
    nodes = [node for node in graph.nodes if str(node.target) in PLACE.operators]
    assert [PLACE.find(node) is not None for node in nodes] == [True]
