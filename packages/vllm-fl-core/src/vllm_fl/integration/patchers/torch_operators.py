"""Operators of PyTorch and vLLM in graphs of vLLM's compiler.

A computation without a layer of its own, such as the product of a linear layer, is an operator in a
compiled graph. A pass of ours (`graphs/replacing.py`) replaces it by a planned op, in the graphs of
the sizes at which that is planned.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import symbolic_trace

from ...contracts.binding import GraphTarget
from ...dispatch.chain import Chain
from ...dispatch.resolver import STOCK
from ...engine.facts import EngineFacts
from ...engine.opaque import opaque_op
from ...engine.plan import Plan
from ...plugins.types import BackendImplKind, OpImpl
from ..engines import Engine
from ..graphs.state import in_graphs
from ..patcher import Patcher, WhyNot
from ..targets import installed_bindings, planned, stock_form, targets


def operator(name: str) -> Any:
    """The operator of a target, as `aten.mm.default`; None where there is none."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _chain(plan: Plan, op: str, target: GraphTarget) -> Chain:
    """Return the candidates, with only vLLM's implementation as code that a compiler traces."""
    chain = plan.chain(op, last=stock_form(op, target.native))
    rows = tuple(
        (n, impls if impls[0].impl_id == STOCK.impl_id else tuple(map(_opaque, impls)))
        for n, impls in chain.rows
    )
    return replace(chain, rows=rows)


def operator_of(plan: Plan, chain: Chain) -> Any:
    """The op of these candidates as one operator of torch, which leaves its arguments as they are.

    Args:
        plan: the plan.
        chain: the candidates of an op of it that has one variant.
    """
    calls = symbolic_trace(opaque_op(chain, plan.place).fn).graph.nodes
    return next(call.target for call in calls if call.op == "call_function")


def _opaque(impl: OpImpl) -> OpImpl:
    return replace(impl, traceable=False)


class OperatorsInGraphs(Patcher):
    """Puts planned ops in the place of operators in graphs."""

    kind = GraphTarget

    def why_not(self, facts: EngineFacts) -> WhyNot:
        known = targets(installed_bindings(), GraphTarget)
        if facts.mode == "eager":
            why = "only in compiled mode: a pass of ours puts it into graphs"
        elif not facts.by_range:
            why = "this engine's compiler runs no pass of ours over its graphs"
        elif facts.batch_invariant:
            why = "VLLM_BATCH_INVARIANT asks for vLLM's own kernel"
        else:
            why = "this vLLM has no such operator"
            known = [each for each in known if not any(map(operator, each[1].operators))]
        return WhyNot({op: why for op, _ in known})

    def keep_stock(self, plan: Plan) -> dict[str, str]:
        """Return the ops whose operator stays.

        A reference is no better than that. And a part that is planned itself is an operator of
        ours.
        """
        found: dict[str, str] = {}
        for op, target in planned(plan, GraphTarget):
            if all(impl.kind is BackendImplKind.REFERENCE for impl in plan.entries[op].firsts):
                found[op] = "its operator is in the graphs already"
            elif ours := [part for part in target.parts if not plan.is_stock(part)]:
                found[op] = f"{ours[0]} is planned itself: vLLM's own code is not there to be found"
        return found

    def by_range(self, plan: Plan) -> dict[str, Chain]:
        return {
            op: _chain(plan, op, target)
            for op, target in planned(plan, GraphTarget)
            if plan.is_partly_stock(op)
        }

    def apply(self, engine: Engine) -> None:
        """Create the operators now: graphs from vLLM's cache call them, too."""
        plan = engine.plan
        for op, target in planned(plan, GraphTarget):
            chain = _chain(plan, op, target)
            in_graphs(engine).seek(op, target, chain, operator_of(plan, chain))
