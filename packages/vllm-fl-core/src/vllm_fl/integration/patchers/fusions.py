"""Ops that a compiler pass of vLLM or vllm-fl inserts into graphs.

Some operators occur only in compiled graphs: a pass of vLLM matches their parts and inserts the
operator. While such an op is planned, its pass is enabled. The parts stay stock, because the pass
matches vLLM's implementations. The operator's override (`operators.py`) then runs the planned
implementation. A pass does not report that it found no match, so vllm-fl counts the operators in
graphs.

A computation without a separate layer, such as the matrix product of a linear layer, is an operator
in a compiled graph. A pass of vllm-fl (`graphs/replacing.py`) replaces this operator with a planned
op, in graphs for the sizes at which the op is planned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import symbolic_trace

from ...contracts.binding import FusionTarget, GraphTarget, OperatorTarget
from ...dispatch.chain import Chain
from ...dispatch.resolver import STOCK
from ...engine.facts import EngineFacts
from ...engine.opaque import opaque_op
from ...engine.plan import Plan
from ...logs import get_logger
from ...plugins.types import BackendImplKind, OpImpl
from ..engines import Engine
from ..graphs import ranges
from ..graphs.state import InGraphs, Sites, Sought, in_graphs
from ..patcher import Patcher, WhyNot
from ..targets import installed_bindings, planned_targets, stock_form, targets
from .ir import ir_ops

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = get_logger("engine")


def _note(target: FusionTarget, facts: EngineFacts) -> str:
    if facts.mode == "eager":
        return "only in compiled mode: a pass of vLLM's compiler inserts it into graphs"
    if target.flag in facts.passes_off:
        return f"pass_config.{target.flag} is false"
    if not has_vllms_pass(target):
        return "vLLM has no pass for it on this platform"
    off = [f"-{layer}" for layer in target.layers if f"-{layer}" in facts.custom_ops]
    return f"custom_ops has {off[0]}, so vLLM's pass cannot match it" if off else ""


def has_vllms_pass(target: FusionTarget) -> bool:
    from vllm.config.compilation import PassConfig
    from vllm.platforms import current_platform

    alike: Callable[[], bool] | None = getattr(current_platform, "is_cuda_alike", None)
    return alike is not None and alike() and target.flag in PassConfig.__dataclass_fields__


def fused_operators(plan: Plan) -> dict[str, str]:
    ops = {op for op, _ in planned_targets(plan, FusionTarget)}
    known = targets(installed_bindings(), OperatorTarget)
    return {operator.name: op for op, operator in known if op in ops}


def _say(label: str, op: str, sites: Sites) -> None:
    if not sites.graphs:
        text = "Op '%s': all graphs came from vLLM's cache, so matches of '%s' are not counted"
        log.info(text, op, label)
    elif sites.found:
        log.info("Op '%s': %d matches, by '%s'", op, sites.found, label)
    else:
        log.warning(
            "Op '%s': no pass found a match (graphs: %d), so '%s' does not run. Its parts may have "
            "other sizes, or a form that the pass does not match (`vllm-fl explain %s`)",
            op,
            sites.graphs,
            label,
            op,
        )


class Fusions(Patcher):
    kind = FusionTarget

    def note_user(self, vllm_config: VllmConfig) -> dict[str, Any]:
        """Return the passes that the user disabled, before vLLM disables others."""
        passes = vllm_config.compilation_config.pass_config
        flags = (target.flag for _, target in targets(installed_bindings(), FusionTarget))
        return {"passes_off": [flag for flag in flags if getattr(passes, flag, None) is False]}

    def why_not(self, facts: EngineFacts) -> WhyNot:
        known = targets(installed_bindings(), FusionTarget)
        found = {op: _note(target, facts) for op, target in known}
        return WhyNot({op: why for op, why in found.items() if why})

    def keep_stock(self, plan: Plan) -> dict[str, str]:
        """Return the parts of planned ops. They must stay stock, because vLLM's passes match only
        vLLM's code. IR ops are omitted, because graphs contain them unchanged until the passes have
        run. A fused op that is stock at some sizes is returned instead of its parts."""
        in_ir = ir_ops()
        found: dict[str, str] = {}
        for op, target in planned_targets(plan, FusionTarget):
            if plan.is_partly_stock(op):
                found[op] = "vLLM's pass inserts it at all sizes, but some sizes are stock"
                continue
            why = f"vLLM's pass for {op} matches only vLLM's implementation"
            parts = (part for part in target.parts if part not in in_ir)
            found |= {part: why for part in parts if not plan.is_stock(part)}
        return found

    def configure(
        self, plan: Plan, vllm_config: VllmConfig, entry: MutableMapping[str, Any]
    ) -> list[str]:
        """Enable the passes of planned ops, and disable passes that only an earlier plan needed.
        Returns the layers that these passes match."""
        passes, ours = vllm_config.compilation_config.pass_config, set(entry.get("passes", ()))
        found = [target for _, target in planned_targets(plan, FusionTarget)]
        wanted = {target.flag for target in found}
        for flag in ours - wanted:
            setattr(passes, flag, False)
        added = {flag for flag in wanted if not getattr(passes, flag, False)}
        for flag in added:
            setattr(passes, flag, True)
        entry["passes"] = sorted((ours & wanted) | added)
        return [layer for target in found for layer in target.layers]

    def apply(self, engine: Engine) -> None:
        ops = (op for op, _ in planned_targets(engine.plan, FusionTarget))
        engine.state[InGraphs] = InGraphs({op: Sites() for op in ops})

    def compiled(self, engine: Engine) -> None:
        """Log the matches of passes on rank 0, without ops that the model does not use."""
        for op, sites in in_graphs(engine).sites.items() if engine.rank == 0 else ():
            if op not in engine.unused:
                _say(engine.plan.entries[op].label, op, sites)

    def report(self, engine: Engine) -> dict[str, Any]:
        sites = dict(in_graphs(engine).sites)
        return {"fusions": {op: dataclasses.asdict(known) for op, known in sites.items()}}


def torch_operator(name: str) -> Any:
    """Return the torch operator with a name such as `aten.mm.default`, or None."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _chain(plan: Plan, op: str, target: GraphTarget) -> Chain:
    """Return the candidates. All except vLLM's implementation are opaque to a compiler."""
    chain = plan.chain(op, last=stock_form(op, target.native))

    def opaque(impls: tuple[OpImpl, ...]) -> tuple[OpImpl, ...]:
        if impls[0].impl_id == STOCK.impl_id:
            return impls
        return tuple(dataclasses.replace(impl, traceable=False) for impl in impls)

    return dataclasses.replace(chain, rows=tuple((n, opaque(impls)) for n, impls in chain.rows))


def operator_of(plan: Plan, chain: Chain) -> Any:
    """Return a torch operator without mutations that runs the chain of a planned op with one
    variant."""
    calls = symbolic_trace(opaque_op(chain, plan.number).fn).graph.nodes
    return next(call.target for call in calls if call.op == "call_function")


class OperatorsInGraphs(Patcher):
    kind = GraphTarget

    def why_not(self, facts: EngineFacts) -> WhyNot:
        known = targets(installed_bindings(), GraphTarget)
        if facts.mode == "eager":
            why = "only in compiled mode: a pass of vllm-fl inserts it into graphs"
        elif not facts.by_range:
            why = "this engine's compiler does not run vllm-fl's passes"
        elif facts.batch_invariant:
            why = "VLLM_BATCH_INVARIANT requires vLLM's own kernel"
        else:
            why = "this vLLM has no such operator"
            known = [each for each in known if not any(map(torch_operator, each[1].operators))]
        return WhyNot({op: why for op, _ in known})

    def keep_stock(self, plan: Plan) -> dict[str, str]:
        """Return the ops that keep their original operator. Either all first candidates are
        reference implementations, which are no better than the operator, or a part is planned,
        which vllm-fl's pass cannot match."""
        found: dict[str, str] = {}
        for op, target in planned_targets(plan, GraphTarget):
            if all(impl.kind is BackendImplKind.REFERENCE for impl in plan.entries[op].firsts):
                found[op] = "graphs already contain its operator"
            elif ours := [part for part in target.parts if not plan.is_stock(part)]:
                found[op] = f"{ours[0]} is planned, so its vLLM code cannot be matched"
        return found

    def configure(
        self, plan: Plan, vllm_config: VllmConfig, entry: MutableMapping[str, Any]
    ) -> list[str]:
        """Let vLLM compile separate graphs for sizes at which ops keep their original operator."""
        known = planned_targets(plan, GraphTarget)
        chains = [_chain(plan, op, target) for op, target in known if plan.is_partly_stock(op)]
        ranges.split(vllm_config, chains, entry)
        return []

    def apply(self, engine: Engine) -> None:
        """Create the operators now, because graphs from vLLM's cache also call them."""
        plan, known = engine.plan, in_graphs(engine)
        for op, target in planned_targets(plan, GraphTarget):
            chain = _chain(plan, op, target)
            known.sites[op] = Sites()
            known.sought.append(Sought(target, chain, operator_of(plan, chain)))
