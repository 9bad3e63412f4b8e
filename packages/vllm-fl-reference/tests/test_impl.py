"""Every op against its contract: values, inputs, refusals, fakes and the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_fl.dispatch.contracts import OpSpec, Sample, contracts
from vllm_fl_reference import plugin

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FUNCTIONS = {impl.op_name: impl.fn for impl in plugin.register_ops()}

Case = tuple[OpSpec, Callable[..., Any], Sample]


def cases(*dtypes: torch.dtype) -> list[Any]:
    return [
        pytest.param(spec, FUNCTIONS[name], sample, id=f"{name}-{str(dtype)[6:]}-{sample.name}")
        for name, spec in contracts().items()
        for dtype in dtypes
        for sample in spec.samples(dtype, CPU)
    ]


def tensors(results: Any) -> list[torch.Tensor]:
    values = results if isinstance(results, tuple) else (results,)
    return [value for value in values if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize(("spec", "function", "sample"), cases(*DTYPES))
def test_within_tolerance_of_the_oracle_and_inputs_unchanged(
    spec: OpSpec, function: Callable[..., Any], sample: Sample
) -> None:
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in sample.args]
    got, want = function(*sample.args), spec.oracle(*before)
    tolerance = spec.tolerance(sample.args[0].dtype)
    assert isinstance(got, tuple) == isinstance(want, tuple)
    for result, exact in zip(tensors(got), tensors(want), strict=True):
        torch.testing.assert_close(result.double(), exact, rtol=tolerance.rtol, atol=tolerance.atol)
    for result, empty in zip(tensors(got), tensors(spec.fake(*sample.args)), strict=True):
        assert result.shape == empty.shape
        assert result.dtype == empty.dtype
        assert result.stride() == empty.stride()
    for result in tensors(got):
        result.fill_(7.0)
    for old, new in zip(before, sample.args, strict=True):
        if isinstance(old, torch.Tensor):
            assert torch.equal(old, new)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bad_input_raises(name: str, dtype: torch.dtype) -> None:
    for bad in contracts()[name].bad_inputs(dtype, CPU):
        refused = (TypeError, ValueError, AttributeError, IndexError, RuntimeError)
        with pytest.raises(refused) as caught:
            FUNCTIONS[name](*bad.args)
        assert not isinstance(caught.value, NotImplementedError), bad.name


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("spec", "function", "sample"), cases(torch.bfloat16))
def test_traces_into_one_graph(
    spec: OpSpec, function: Callable[..., Any], sample: Sample, dynamic: bool
) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    traced = torch.compile(function, backend=count, fullgraph=True, dynamic=dynamic)
    for result, want in zip(
        tensors(traced(*sample.args)), tensors(function(*sample.args)), strict=True
    ):
        assert torch.equal(result, want)
    assert len(graphs) == 1


def test_one_graph_serves_every_batch_size() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    traced = torch.compile(FUNCTIONS["rms_norm"], backend=count, fullgraph=True)
    weight = torch.ones(64)
    for tokens in (2, 5, 17, 200):
        x, residual = torch.randn(tokens, 64), torch.randn(tokens, 64)
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(residual, 0)
        traced(x, residual, weight, 1e-6)
    assert len(graphs) == 1


@pytest.fixture(scope="module")
def library() -> Any:
    """Every variant of every op as a torch.library op with the contract's schema and fake."""
    with torch.library._scoped_library("vllm_fl_reference_test", "DEF") as library:
        for name, spec in contracts().items():
            for variant in spec.variants:
                op = f"{name}_{variant.name}" if variant.name else name
                library.define(f"{op}{variant.schema}")

                def wrap(
                    function: Callable[..., Any], spec: OpSpec = spec, variant: Any = variant
                ) -> Callable[..., Any]:
                    def call(*args: Any, **options: Any) -> Any:
                        given = dict.fromkeys(spec.parameters)
                        given |= dict(zip(variant.parameters, args, strict=False)) | options
                        for parameter, value in spec.signature.parameters.items():
                            if given[parameter] is None and value.default is not value.empty:
                                given[parameter] = value.default
                        results = tensors(function(**given))
                        return results[0] if len(results) == 1 else tuple(results)

                    return call

                library.impl(op, wrap(FUNCTIONS[name]), "CompositeExplicitAutograd")
                library._register_fake(op, wrap(spec.fake))
        yield torch.ops.vllm_fl_reference_test


@pytest.mark.parametrize(("spec", "function", "sample"), cases(torch.bfloat16))
def test_as_a_torch_library_op(
    spec: OpSpec, function: Callable[..., Any], sample: Sample, library: Any
) -> None:
    given = dict(zip(spec.parameters, sample.args, strict=True))
    variant = spec.variant_for(given)
    op = getattr(library, f"{spec.name}_{variant.name}" if variant.name else spec.name)
    args = tuple(given[parameter] for parameter in variant.parameters)
    torch.library.opcheck(op.default, args, test_utils=("test_schema", "test_faketensor"))
    for result, want in zip(tensors(op(*args)), tensors(function(*sample.args)), strict=True):
        assert torch.equal(result, want)
