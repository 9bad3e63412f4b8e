"""Targets of routing: vLLM's functions and operators return the planned op's results."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from builders import managing, planning, taking
from of_acme import acme
from torch import Tensor

from vllm_fl.contracts.binding import FunctionTarget, OperatorTarget
from vllm_fl.engine.plan import Plan
from vllm_fl.integration.patchers import functions
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.types import OpImpl

ALIGN = "moe_align_block_size"
ROUTER = "vllm.model_executor.layers.fused_moe.router"

torch.manual_seed(0)
LOGITS, BIAS = torch.randn(7, 32), torch.randn(32)


def by_oracle(op: str, refuses: bool) -> OpImpl:
    """An implementation in the contract's dtypes. Each token's experts have another order than in
    vLLM; rows sorted by expert have the oracle's order."""
    spec = known_contracts().contracts[op]

    def fn(*args: Any) -> Any:
        weights, ids = spec.oracle(*args)
        return weights.float().flip(-1).contiguous(), ids.flip(-1).contiguous()

    supports = (lambda *args: "never") if refuses else None
    return acme(op, spec.oracle if op == ALIGN else fn, supports=supports)


@contextmanager
def engine(op: str, refuses: bool = False) -> Iterator[Plan]:
    """An engine with `op` in its plan, in this thread."""
    plan = replace(planning(managing(by_oracle(op, refuses))), counts_calls=True)
    with taking(plan, {op: known_contracts().bindings[op]}, functions.Functions()):
        yield plan


def in_order(routing: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    weights, ids = routing
    ids, order = ids.long().sort(-1)
    return weights.gather(-1, order), ids


def assert_same(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> None:
    assert [part.dtype for part in one] == [part.dtype for part in other]
    for mine, theirs in zip(in_order(one), in_order(other), strict=True):
        torch.testing.assert_close(mine, theirs)


CALLS = {
    "_softmax_topk": ("moe_topk", "cpu_router", (LOGITS, 4, True)),
    "_softmax_topk, plain": ("moe_topk", "cpu_router", (LOGITS, 4, False)),
    "_grouped_topk": ("grouped_topk", "cpu_router", (LOGITS, 4, True, 4, 2, "sigmoid", 2.5, BIAS)),
    "grouped_topk": (
        "grouped_topk",
        "grouped_topk_router",
        (LOGITS, LOGITS, 4, True, 4, 2, "softmax", 1.5, None),
    ),
}


@pytest.mark.parametrize("refuses", [False, True], ids=["ours", "refused"])
@pytest.mark.parametrize("call", CALLS)
def test_functions_of_vllms_give_what_is_planned(call: str, refuses: bool) -> None:
    op, name, args = CALLS[call]
    module = pytest.importorskip(f"{ROUTER}.{name}")
    attribute = call.partition(",")[0]
    own = getattr(module, attribute)
    want = getattr(own, "__wrapped__", own)(*args)
    with engine(op, refuses) as plan:
        replaced = getattr(module, attribute)
        assert replaced is not own
        # A function that vLLM compiles is called uncompiled: compiling takes a minute here.
        got = want if refuses and own is not getattr(own, "__wrapped__", own) else replaced(*args)
    assert getattr(module, attribute) is own
    assert_same(got, want)
    if got is not want:
        assert plan.calls
        assert torch.equal(got[1], want[1]) == refuses, "the order of experts says whose it is"


def test_the_router_of_the_cpu_build_calls_what_is_replaced() -> None:
    module = pytest.importorskip(f"{ROUTER}.cpu_router")
    hidden = torch.randn(7, 8)
    with engine("moe_topk") as plan:
        module.select_experts(hidden, LOGITS, 4, False, True)
    assert plan.calls == {("moe_topk", "vendor.acme"): 1}
    with engine("grouped_topk") as plan:
        groups = {"topk_group": 2, "num_expert_group": 4}
        module.select_experts(hidden, LOGITS, 4, True, True, **groups)
    assert plan.calls == {("grouped_topk", "vendor.acme"): 1}


def targets(op: str, kind: type) -> list[Any]:
    return [target for target in known_contracts().bindings[op].targets if isinstance(target, kind)]


@pytest.mark.parametrize(
    "target", targets("moe_topk", OperatorTarget), ids=lambda p: p.parameters[-1]
)
@pytest.mark.parametrize("indices", [torch.int32, torch.int64], ids=str)
def test_operators_leave_weights_and_ids_and_no_experts_for_padding(
    target: OperatorTarget, indices: torch.dtype
) -> None:
    spec = known_contracts().contracts["moe_topk"]
    how = target.name.removeprefix("_moe_C::topk_")
    kernel = target.route(by_oracle("moe_topk", False).fn)
    weights, rows = torch.zeros(7, 4), torch.zeros(7, 4, dtype=torch.int32)
    ids = torch.zeros(7, 4, dtype=indices)
    scaled = "routed_scaling_factor" in target.parameters
    padding = torch.tensor([False] * 5 + [True] * 2)
    padded = "is_padding" in target.parameters
    args = (weights, ids, rows, LOGITS, True, BIAS, *(2.5,) * scaled, *(padding,) * padded)
    assert len(args) == len(target.parameters)
    assert kernel(*args) is None
    want = spec.oracle(LOGITS, 4, True, how, 2.5 if scaled else 1.0, BIAS)
    torch.testing.assert_close(weights.flip(-1), want[0].float())
    count = 5 if padded else 7
    assert torch.equal(ids[:count].flip(-1), want[1][:count].to(indices))
    assert (ids[count:] == -1).all()


def test_the_sum_is_left_where_the_operator_leaves_it() -> None:
    (target,) = targets("moe_sum", OperatorTarget)
    op = known_contracts().contracts["moe_sum"].oracle
    kernel, out = target.route(op), torch.zeros(7, 8)
    x, ids = torch.randn(7, 2, 8), torch.tensor([[0, -1]] * 7)
    assert kernel(x, out, ids, None) is None
    assert torch.equal(out, x[:, 0])
    assert kernel(x, out, None, torch.zeros(4, dtype=torch.int32)) is None
    torch.testing.assert_close(out, x.sum(1))
    assert kernel(x, torch.zeros(14, 8)) is NotImplemented
    calls: list[Any] = []
    target.native(lambda *args: calls.append(args))(x, ids, None)
    assert calls[0][0] is x and calls[0][1].shape == out.shape and calls[0][2:] == (ids, None)


def test_every_module_that_sorts_rows_by_expert_gets_the_planned_op() -> None:
    (target,) = targets(ALIGN, FunctionTarget)
    modules = [path.rpartition(".")[0] for path in target.paths]
    found = [import_module(name) for name in modules if find_spec_of(name)]
    assert len(found) >= 7
    ids = torch.tensor([[0, 2], [2, -1]], dtype=torch.int32)
    with engine(ALIGN) as plan:
        for module in found:
            rows, experts, used = module.moe_align_block_size(ids, 2, 4, pad_sorted_ids=True)
            assert rows.tolist() == [0, 4, 1, 2, 4, 4, 4, 4]
            assert (experts.tolist(), used.tolist()) == ([0, 2, -1, -1], [4])
    assert plan.calls == {(ALIGN, "vendor.acme"): len(found)}
    assert not any(hasattr(module.moe_align_block_size, "__wrapped__") for module in found)


def find_spec_of(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package is missing too
        return False


def test_nobody_else_imports_the_function_that_sorts_rows() -> None:
    (target,) = targets(ALIGN, FunctionTarget)
    root = Path(find_spec("vllm").submodule_search_locations[0])  # type: ignore[union-attr,index]
    importing = re.compile(r"moe_align_block_size import (\([^)]*|.*)\bmoe_align_block_size\b")
    modules = {
        ".".join(("vllm", *path.relative_to(root).with_suffix("").parts))
        for path in root.glob("model_executor/layers/**/*.py")
        if importing.search(path.read_text("utf-8"))
    }
    assert modules <= {path.rpartition(".")[0] for path in target.paths}


@pytest.mark.parametrize(
    ("ids", "more"),
    [
        (torch.zeros(2, 2, dtype=torch.uint32), {}),
        (torch.zeros(2, dtype=torch.int32), {}),
        (torch.zeros(2, 2, dtype=torch.int32), {"return_scatter_idx": True}),
    ],
    ids=["unsigned", "one dimension", "with the place of each row"],
)
def test_other_calls_that_sort_rows_are_vllms(
    ids: Tensor, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module("vllm.model_executor.layers.fused_moe.moe_align_block_size")
    if more and "return_scatter_idx" not in signature(module.moe_align_block_size).parameters:
        pytest.skip("this vLLM does not ask for it")
    asked = []
    monkeypatch.setattr(module.ops, ALIGN, lambda *args: asked.append(args))
    with engine(ALIGN) as plan:
        module.moe_align_block_size(ids, 2, 4, **more)
    assert not plan.calls and len(asked) == 1


def test_rows_that_no_implementation_sorts_are_sorted_by_vllm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = import_module("vllm.model_executor.layers.fused_moe.moe_align_block_size")
    here, asked = torch.zeros(4, dtype=torch.int32), []
    monkeypatch.setattr(module.ops, ALIGN, lambda *args: asked.append(args))
    with engine(ALIGN, refuses=True):
        ids = torch.zeros(2, 2, dtype=torch.int32)
        rows, _, _ = module.moe_align_block_size(ids, 2, 4, here, ignore_invalid_experts=True)
    ((first, experts, size, *outs, where), *_) = [args[:7] for args in asked]
    assert first is ids and (experts, size) == (4, 2) and where is here and outs[0] is rows
