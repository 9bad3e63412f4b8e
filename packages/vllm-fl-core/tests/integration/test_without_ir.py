"""Norms where vLLM has no IR: what a compiler sees in the layers is what the plan says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from builders import kind_of, managing, planning
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import custom_op
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

import vllm_fl.dispatch
from vllm_fl.dispatch.context import building
from vllm_fl.dispatch.manager import OpManager
from vllm_fl.engine.plan import Plan
from vllm_fl.integration.patchers import ir as ir_patcher
from vllm_fl.integration.patchers.layers import replace_layers
from vllm_fl.plugins.types import OpImpl

HIDDEN = 64
NORMS = ("RMSNorm", "GemmaRMSNorm")
X = torch.ones(3, HIDDEN)


@pytest.fixture(autouse=True)
def no_ir(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The layers are replaced as in a release without `vllm.ir`."""
    monkeypatch.setattr(ir_patcher, "has_ir", lambda: False)
    before = {name: custom_op.op_registry_oot.pop(name, None) for name in NORMS}
    with set_current_vllm_config(VllmConfig()), torch.no_grad():
        replace_layers()
        yield
    for name, cls in before.items():
        custom_op.op_registry_oot.pop(name)
        if cls is not None:
            custom_op.op_registry_oot[name] = cls


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., OpManager]:
    """`use(impl, …)`: they are what is installed."""

    def install(*impls: OpImpl) -> OpManager:
        order = {"rms_norm": ["flagos", "vendor", "reference"]}
        manager = managing(*impls, per_op_order=order)
        monkeypatch.setattr(vllm_fl.dispatch.default, "manager", manager)
        return manager

    return install


def norm(impl_id: str, mark: float, **fields: Any) -> OpImpl:
    """A norm whose result is x times weight, plus a mark."""

    def rms_norm(
        x: Any, residual: Any, weight: Any, epsilon: Any, variance_size: Any = None
    ) -> Any:
        normed = ((x if weight is None else x * weight) + mark).to(x.dtype)
        return normed if residual is None else (normed, x + residual)

    kind, vendor = kind_of(impl_id)
    return OpImpl("rms_norm", impl_id, kind, rms_norm, vendor, **fields)


def compiled(plan: Plan, cls: Any) -> tuple[list[str], Any, Any]:
    """(the code of the graphs, what a norm without residual gives, what one with it gives)."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = cls(HIDDEN)

        def forward(self, x: torch.Tensor, residual: torch.Tensor) -> Any:
            return self.norm(x), self.norm.forward_native(x.clone(), residual.clone())

    with building(plan):
        model = Model()
    codes = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        codes.append(graph.code)
        return graph.forward

    torch._dynamo.reset()
    plain, pair = torch.compile(model, fullgraph=True, backend=backend)(X, X)
    return codes, plain, pair


@pytest.mark.parametrize("cls", [RMSNorm, GemmaRMSNorm])
def test_an_opaque_norm_is_one_operator(use: Any, cls: Any) -> None:
    plan = planning(use(norm("vendor.acme", 5)), "compiled")
    (code,), plain, (normed, total) = compiled(plan, cls)
    assert code.count("vllm_fl.rms_norm") == 2 and "vllm_ir" not in code
    assert plain.eq(6).all() and normed.eq(6).all() and total.eq(2).all()


@pytest.mark.parametrize("cls", [RMSNorm, GemmaRMSNorm])
def test_a_traceable_norm_is_open_to_the_compiler(use: Any, cls: Any) -> None:
    plan = planning(use(norm("vendor.acme", 5, traceable=True)), "compiled")
    (code,), plain, (normed, total) = compiled(plan, cls)
    assert "vllm_fl" not in code and "vllm_ir" not in code
    assert plain.eq(6).all() and normed.eq(6).all() and total.eq(2).all()


@pytest.mark.parametrize("cls", [RMSNorm, GemmaRMSNorm])
def test_what_all_refuse_is_computed_as_vllm_does_bit_for_bit(use: Any, cls: Any) -> None:
    def refuses(x: Any, residual: Any, weight: Any, epsilon: Any, variance_size: Any = None) -> str:
        return "not today"

    refusing = norm("vendor.acme", 5, supports=refuses)
    plan = planning(use(refusing), "eager")
    with building(plan):
        layer = cls(HIDDEN)
    for dtype in (torch.float32, torch.bfloat16):
        x, residual = torch.randn(5, HIDDEN, dtype=dtype), torch.randn(5, HIDDEN, dtype=dtype)
        assert torch.equal(layer(x), cls.forward_native(layer, x))
        want = cls.forward_native(layer, x.clone(), residual.clone())
        got = layer(x.clone(), residual.clone())
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    assert plan.fallbacks["rms_norm", "stock.vllm"] == 4
