"""Products and what follows them, found in graphs as Inductor passes them to passes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import gelu, linear, silu

from vllm_fl.contracts.binding import GraphTarget
from vllm_fl.plugins.registry import known_contracts

pytest.importorskip("vllm", reason="the binding asks for its platform")

import vllm.platforms

BINDING = known_contracts().bindings["linear_silu_and_mul"]
OF_GELU = known_contracts().bindings["linear_gelu_tanh_and_mul"]
TARGET, GELU = (
    target
    for each in (BINDING, OF_GELU)
    for target in each.targets
    if isinstance(target, GraphTarget)
)
D = 32
Function = Callable[..., Tensor]


def made(rows: int = 5, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 48, dtype=dtype), torch.randn(2 * D, 48, dtype=dtype)


def found_in(graph: torch.fx.Graph, target: GraphTarget = TARGET) -> list[Any]:
    """The target's finds in a graph, which must stay unchanged."""
    before = str(graph)
    nodes = [node for node in graph.nodes if str(node.target) in target.operators]
    found = [args for args in map(target.find, nodes) if args is not None]
    assert str(graph) == before
    return found


class Finding(CustomGraphPass):
    def __init__(self, target: GraphTarget) -> None:
        self.target = target
        self.found: list[tuple[Any, ...]] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        inputs = graph.find_nodes(op="placeholder")
        for args in found_in(graph, self.target):
            assert all(arg in inputs for arg in args)
            self.found.append(tuple(arg.meta["val"].shape for arg in args))

    def uuid(self) -> Any:
        return None


def found_by_inductor(
    function: Function, *args: Tensor, dynamic: bool = False, target: GraphTarget = TARGET
) -> list[Any]:
    """The shapes of x and weight of each find in a compiled function."""
    finding = Finding(target)
    torch._dynamo.reset()
    if dynamic:
        torch._dynamo.mark_dynamic(args[0], 0)
    options = {"force_disable_caches": True, "post_grad_custom_post_pass": finding}
    with torch._inductor.config.patch(**options), torch.no_grad():
        torch.compile(function, fullgraph=True)(*args)
    return finding.found


def found(
    function: Function, *args: Tensor, whole: bool = False, target: GraphTarget = TARGET
) -> list[Any]:
    """The target's finds in a graph that is traced without Inductor, which is fast. `whole` keeps
    the activation an operator."""
    table = {} if whole else select_decomp_table()
    graph = make_fx(function, table, tracing_mode="fake")(*args).graph
    graph.eliminate_dead_code()
    return found_in(graph, target)


def as_vllm(x: Tensor, weight: Tensor) -> Tensor:
    """`MergedColumnParallelLinear`, and `SiluAndMul.forward_native`."""
    y = linear(x, weight)
    d = y.shape[-1] // 2
    return silu(y[..., :d]) * y[..., d:]


def one_row(x: Tensor, weight: Tensor) -> Tensor:
    """One row's product, as Inductor decomposes it for a single size."""
    y = (x.unsqueeze(2) * weight.t().unsqueeze(0)).sum(dim=1)
    return silu(y[..., :D]) * y[..., D:]


DTYPES = pytest.mark.parametrize(
    ("dtype", "dynamic"),
    [
        (torch.bfloat16, True),
        pytest.param(torch.float16, False, marks=pytest.mark.slow),
        pytest.param(torch.float32, True, marks=pytest.mark.slow),
    ],
)


def of(last: Callable[[Tensor], Any]) -> Function:
    return lambda x, weight: last(linear(x, weight))


def in_chunks(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, dim=-1)
    return silu(gate) * up


def in_pieces(y: Tensor) -> Tensor:
    gate, up = y.split([D, D], dim=1)
    return up * silu(gate)


FORMS = {
    "as vLLM": as_vllm,
    "in the other order": of(lambda y: y[..., D:] * silu(y[..., :D])),
    "in chunks": of(in_chunks),
    "in pieces": of(in_pieces),
}


def slow_but(first: Function, *others: Function) -> pytest.MarkDecorator:
    """Functions; only the first is compiled by default."""
    slow = [pytest.param(other, marks=pytest.mark.slow) for other in others]
    return pytest.mark.parametrize("function", [first, *slow])


@slow_but(*FORMS.values())
@DTYPES
def test_it_is_found_in_the_graphs_of_a_compiler(
    function: Function, dtype: torch.dtype, dynamic: bool
) -> None:
    args = made(dtype=dtype)
    ((of_x, of_weight),) = found_by_inductor(function, *args, dynamic=dynamic)
    assert (of_x[1], of_weight) == (48, (2 * D, 48)) and isinstance(of_x[0], int) is not dynamic
    torch.testing.assert_close(TARGET.native(*args), function(*args))


@slow_but(one_row, as_vllm, FORMS["in pieces"])
def test_it_is_found_where_a_graph_is_of_one_row(function: Function) -> None:
    args = made(1, torch.float32)
    assert len(found_by_inductor(function, *args)) == len(found(function, *args)) == 1
    torch.testing.assert_close(TARGET.native(*args), function(*args))


@pytest.mark.parametrize("function", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("whole", [True, False])
def test_it_is_found_where_silu_is_one_operator_too(function: Function, whole: bool) -> None:
    assert len(found(function, *made(), whole=whole)) == 1


def three(y: Tensor) -> Tensor:
    return silu(y[..., :D]) * y[..., D:] + y[..., D - 1 : -1]


def other_number(y: Tensor) -> Tensor:
    gate = y[..., :D].float()
    return (gate / ((-gate).exp() + 2)).to(y.dtype) * y[..., D:]


def twice_the_number(y: Tensor) -> Tensor:
    gate = y[..., :D].float()
    return (gate / torch.add((-gate).exp(), 1, alpha=2)).to(y.dtype) * y[..., D:]


def sigmoid_of_up(y: Tensor) -> Tensor:
    up = y[..., D:]
    return (y[..., :D].float() / ((-up.float()).exp() + 1)).to(y.dtype) * up


def through(dtype: torch.dtype) -> Function:
    """Gates of another dtype; their silu has the first dtype again."""

    def function(y: Tensor) -> Tensor:
        gate = y[..., :D].to(dtype)
        return (gate / ((-gate).exp() + 1)).to(y.dtype) * y[..., D:]

    return of(function)


def read_on_the_way(y: Tensor) -> tuple[Tensor, Tensor]:
    activated = silu(y[..., :D])
    return activated * y[..., D:], activated + 1


WRONG: dict[str, Function] = {
    "gelu": of(lambda y: gelu(y[..., :D]) * y[..., D:]),
    "sigmoid": of(lambda y: y[..., :D].sigmoid() * y[..., D:]),
    "a formula with another number": of(other_number),
    "a formula with another factor": of(twice_the_number),
    "a formula of both halves": of(sigmoid_of_up),
    "the halves swapped": of(lambda y: silu(y[..., D:]) * y[..., :D]),
    "one half twice": of(lambda y: silu(y[..., :D]) * y[..., :D]),
    "the other half twice": of(lambda y: silu(y.chunk(2, -1)[1]) * y.chunk(2, -1)[1]),
    "silu of both": of(lambda y: silu(y[..., :D]) * silu(y[..., D:])),
    "parts that are not halves": of(lambda y: silu(y[..., : D - 2]) * y[..., D + 2 :]),
    "every other feature": of(lambda y: silu(y[..., ::2]) * y[..., 1::2]),
    "every other feature of the gate": of(lambda y: silu(y[..., ::2]) * y[..., D:]),
    "every other feature of up": of(lambda y: silu(y[..., :D]) * y[..., ::2]),
    "the largest half": of(lambda y: silu(y.topk(D).values) * y[..., D:]),
    "a half that does not begin at the first": of(lambda y: silu(y[..., 1 : D + 1]) * y[..., D:]),
    "a half that does not end at the last": of(lambda y: silu(y[..., :D]) * y[..., 2 : D + 2]),
    "rows": lambda x, weight: silu(linear(x, weight)[:D]) * linear(x, weight)[D:],
    "rows in pieces": of(lambda y: silu(y.split(2)[0]) * y.split(2)[1]),
    "the first and the third of three": of(
        lambda y: silu(y.split([D, 0, D], -1)[0]) * y.split([D, 0, D], -1)[2]
    ),
    "a product that is read elsewhere": of(three),
    "silu that is read elsewhere": of(read_on_the_way),
    "a number": of(lambda y: silu(y[..., :D]) * 2),
    "a result in another dtype": of(lambda y: silu(y[..., :D].float()) * y[..., D:]),
    "gates cut to integers": through(torch.int32),
    "gates rounded to fewer digits": through(torch.float8_e5m2),
    "two products": lambda x, weight: (
        silu(linear(x, weight)[..., :D]) * linear(x * 2, weight)[..., D:]
    ),
    "a bias": lambda x, weight: in_chunks(linear(x, weight, weight[:, 0])),
    "a weight that is no input": lambda x, weight: in_chunks(linear(x, weight * 2)),
    "no product": lambda x, weight: in_chunks(weight.exp()),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16, torch.float16], ids=str)
def test_float32_that_loses_digits_on_the_way_is_left_alone(dtype: torch.dtype) -> None:
    activated = of(lambda y: silu(y[..., :D]).to(dtype) * y[..., D:])
    for function in (activated, through(dtype)):
        assert not found(function, *made(dtype=torch.float32))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("function", WRONG.values(), ids=WRONG)
def test_what_is_something_else_is_left_alone(function: Function, whole: bool) -> None:
    rows = 2 * D if function is WRONG["rows"] else 4
    assert not found(function, *made(rows), whole=whole)


def test_halves_of_two_products_are_left_alone() -> None:
    def function(x: Tensor, weight: Tensor, other: Tensor, factors: Tensor) -> Tensor:
        return silu(linear(x, weight)[..., :D]) * linear(other, factors)[..., D:]

    assert not found(function, *made(), *made())


def test_parts_of_what_nothing_computes_are_left_alone() -> None:
    graph = torch.fx.Graph()
    halves = graph.placeholder("halves")
    gate, up = (graph.call_function(operator.getitem, (halves, at)) for at in (0, 1))
    activated = graph.call_function(torch.ops.aten.silu.default, (gate,))
    graph.call_function(torch.ops.aten.mul.Tensor, (activated, up))
    assert not found_in(graph)


def gelu_first(x: Tensor, weight: Tensor) -> Tensor:
    """`MergedColumnParallelLinear`, and `GeluAndMul.forward_native`."""
    y = linear(x, weight)
    d = y.shape[-1] // 2
    return gelu(y[..., :d], approximate="tanh") * y[..., d:]


@slow_but(gelu_first, of(lambda y: y.chunk(2, -1)[1] * gelu(y.chunk(2, -1)[0], approximate="tanh")))
@DTYPES
def test_gelu_is_found_by_the_op_that_has_it(
    function: Function, dtype: torch.dtype, dynamic: bool
) -> None:
    args = made(dtype=dtype)
    ((of_x, of_weight),) = found_by_inductor(function, *args, dynamic=dynamic, target=GELU)
    assert (of_x[1], of_weight) == (48, (2 * D, 48)) and isinstance(of_x[0], int) is not dynamic
    torch.testing.assert_close(GELU.native(*args), function(*args))
    for whole in (True, False):
        assert not found(function, *args, whole=whole)
        assert len(found(function, *args, whole=whole, target=GELU)) == 1


def other_power(y: Tensor) -> Tensor:
    gate = y[..., :D].float()
    inner = (gate + gate * gate * gate * 0.0447) * 0.7978845608028654
    return (gate * 0.5 * (inner.tanh() + 1)).to(y.dtype) * y[..., D:]


def two_gates(y: Tensor) -> Tensor:
    gate, up = y[..., :D].float(), y[..., D:].float()
    inner = (gate + gate * gate * up * 0.044715) * 0.7978845608028654
    return (gate * 0.5 * (inner.tanh() + 1)).to(y.dtype) * y[..., D:]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "function",
    [
        as_vllm,
        of(lambda y: gelu(y[..., :D]) * y[..., D:]),
        of(lambda y: gelu(y[..., D:], approximate="tanh") * y[..., :D]),
        of(other_power),
        of(two_gates),
    ],
    ids=["silu", "by the error function", "the halves swapped", "another number", "two gates"],
)
def test_what_is_not_gelu_of_the_gate_is_left_alone(function: Function, whole: bool) -> None:
    assert not found(function, *made(), whole=whole, target=GELU)


def config(quantization: str | None = None, transformers: bool = False, **fields: Any) -> Any:
    hf = SimpleNamespace(to_dict=lambda: fields, **({"intermediate_size": 96} | fields))
    return SimpleNamespace(
        model_config=SimpleNamespace(
            quantization=quantization,
            hf_config=hf,
            hf_text_config=hf,
            using_transformers_backend=lambda: transformers,
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )


@pytest.mark.parametrize(
    ("fields", "has"),
    [
        ({"hidden_act": "silu"}, True),  # Llama, Qwen, Mistral, Phi 3 and 4, Cohere, Granite
        ({"activation_type": "swiglu"}, True),
        ({"hidden_act": "silu", "activation_function": "gelu"}, True),
        ({"ffn_hidden_size": 96}, True),  # ChatGLM
        ({"block_ff_dim": 96}, True),  # LFM2
        ({"hidden_act": "gelu_pytorch_tanh"}, False),
        ({"hidden_activation": "gelu_pytorch_tanh"}, False),
        ({"ffn_config": {"ffn_act_fn": {"name": "gelu"}}}, False),
        ({"hidden_act": "silu", "quantization": "fp8"}, False),
        ({"hidden_act": "silu", "num_experts": 8}, False),
        ({"hidden_act": "silu", "transformers": True}, False),  # its tensors have three dimensions
    ],
    ids=str,
)
def test_models_with_swiglu_may_have_it(
    fields: dict[str, Any], has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert BINDING.when is not None and OF_GELU.when is not None and not BINDING.products
    engine = config(**fields)
    assert BINDING.when(engine) is False, "vLLM's CPU platform packs its weights"
    monkeypatch.setattr(vllm.platforms.current_platform, "is_cpu", lambda: False)
    assert BINDING.when(engine) is has
    assert OF_GELU.when(engine) is ("gelu_pytorch_tanh" in fields.values())
