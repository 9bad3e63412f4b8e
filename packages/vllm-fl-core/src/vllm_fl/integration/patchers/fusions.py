"""Targets that we take: what passes of vLLM's compiler put into graphs.

Some operators no code of vLLM's calls: a pass finds their parts in a compiled graph, and puts the
operator there. While the plan has such an op, the pass is turned on and its parts are left to
vLLM, so that it finds them; which implementation then runs is the operator's override
(`operators.py`). A pass that finds nothing says nothing: how often it found the op is counted.

On a plugin's device, which has none of these passes, one of ours takes their place
(`graphs/finding.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from ...contracts.binding import FusionTarget, OperatorTarget
from ...dispatch.chain import Chain
from ...dispatch.resolver import STOCK
from ...engine.facts import EngineFacts
from ...engine.opaque import is_opaque, opaque_op
from ...engine.plan import Plan
from ...logs import get_logger
from ...plugins.types import OpImpl
from ...settings.loading import Settings
from ...text import quote
from ..engines import Engine, now
from ..graphs.state import InGraphs, Sites, in_graphs
from ..patcher import Patcher, WhyNot
from ..targets import installed_bindings, planned, stock_form, targets
from .ir import ir_ops
from .lookups import named

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = get_logger("engine")

VLLMS_MANAGER = "vllm.compilation.passes.pass_manager.PostGradPassManager"
"""What runs vLLM's passes over a graph: one of ours finds what it leaves."""


_watched: set[type] = set()


def _note(target: FusionTarget, facts: EngineFacts) -> str:
    if facts.mode == "eager":
        return "only in compiled mode: a pass of vLLM's compiler puts it into graphs"
    if target.flag in facts.passes_off:
        return f"pass_config.{target.flag} is false"
    if not _is_there(target):
        return "" if _is_ours(target, facts) else "vLLM has no pass for it on this platform"
    off = [f"-{layer}" for layer in target.layers if f"-{layer}" in facts.custom_ops]
    return f"custom_ops has {off[0]}, without which vLLM's pass does not find it" if off else ""


def _is_there(target: FusionTarget) -> bool:
    """Whether this vLLM has the pass, and lets it run on this platform."""
    from vllm.config.compilation import PassConfig
    from vllm.platforms import current_platform

    alike: Callable[[], bool] | None = getattr(current_platform, "is_cuda_alike", None)
    return alike is not None and alike() and target.flag in PassConfig.__dataclass_fields__


def _is_ours(target: FusionTarget, facts: EngineFacts) -> bool:
    """Whether the pass of ours can run here: on a plugin's device with vLLM's own pass manager."""
    from vllm.platforms import current_platform

    device = getattr(current_platform, "vllm_fl_device", None)
    return bool(
        target.own is not None
        and device is not None
        and facts.by_range
        and current_platform.vllm_fl_stock_pass_manager() == VLLMS_MANAGER
    )


def is_by_range(target: FusionTarget) -> bool:
    """Whether graphs can have the op at some sizes, and vLLM's own code at others.

    That is where the pass is vLLM's, which we run for the ranges of sizes in which the op is
    planned (`graphs/unfused.py`). A pass of ours puts the op in all graphs.
    """
    return _is_there(target) and bool(target.unfused)


def operators(plan: Plan) -> list[tuple[str, OperatorTarget, Chain]]:
    """(planned op, an operator that a pass of vLLM's puts into graphs for it, its candidates)."""
    known = targets(installed_bindings(), OperatorTarget)
    return [
        (op, operator, plan.chain(op, last=stock_form(op, target.native)))
        for op, target in planned(plan, FusionTarget)
        if _is_there(target)
        for of_op, operator in known
        if of_op == op
    ]


def by_range(plan: Plan) -> dict[str, tuple[FusionTarget, Chain]]:
    """Op -> (its target, its candidates by rows), of ops that are left to vLLM at some sizes.

    Of the candidates the code of vLLM's own form alone stands in graphs: the others run inside the
    operator that the pass puts there.
    """
    found = {}
    for op, target in planned(plan, FusionTarget):
        if plan.is_partly_stock(op) and is_by_range(target):
            found[op] = target, taken_whole(plan.chain(op, last=stock_form(op, target.native)))
    return found


def taken_whole(chain: Chain) -> Chain:
    """The chain with candidates that no compiler looks into, but for vLLM's own form alone."""

    def whole(impls: tuple[OpImpl, ...]) -> tuple[OpImpl, ...]:
        if impls[0].impl_id == STOCK.impl_id:
            return impls
        return tuple(dataclasses.replace(impl, traceable=False) for impl in impls)

    rows = tuple((ceiling, whole(impls)) for ceiling, impls in chain.rows)
    return dataclasses.replace(chain, rows=rows)


def _finds_ours(plan: Plan, target: FusionTarget) -> bool:
    """Whether the target's pass is ours, which finds an operator of ours."""
    return not plan.whole.isdisjoint(target.parts)


def operator_of(plan: Plan, chain: Chain) -> Any:
    """The op of these candidates as one operator of torch, which leaves its arguments as they are.

    Args:
        plan: the plan.
        chain: the candidates of an op of it that has one variant.
    """
    from torch.fx import symbolic_trace

    calls = symbolic_trace(opaque_op(chain, plan.place).fn).graph.nodes
    return next(call.target for call in calls if call.op == "call_function")


def _counting(run: Callable[..., Any], op: str) -> Callable[..., Any]:
    """A pass's `__call__`, which leaves in `matched_count` what it found in this graph."""

    def counted(self: Any, graph: Any) -> Any:
        result = run(self, graph)
        engine = now()
        known = None if engine is None else in_graphs(engine).sites.get(op)
        if known is not None:
            known.graphs += 1
            known.found += self.matched_count
        return result

    return counted


def _say(label: str, op: str, known: Sites, whose: str) -> None:
    if known.found:
        where = _counted_as(known.found, "place")
        by_graphs = f"; graphs launch it themselves in {known.launched}" * bool(known.launched)
        log.info("Op '%s': %s, by '%s'%s", op, where, label, by_graphs)
    elif known.graphs:
        log.warning(
            "Op '%s': %s pass found no place for it in %s, so that '%s' does not run. Its "
            "parts may be of other sizes, or of a form that the pass does not know "
            "(`vllm-fl explain %s`)",
            op,
            whose,
            _counted_as(known.graphs, "graph"),
            label,
            op,
        )
    else:
        log.info(
            "Op '%s': no graph was compiled, as where vLLM has them in its cache: in how many "
            "places '%s' runs is not counted",
            op,
            label,
        )


def _counted_as(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


class Fusions(Patcher):
    """Turns on the passes that put planned ops into graphs."""

    kind = FusionTarget

    def note_user(self, vllm_config: VllmConfig) -> dict[str, Any]:
        """Return the passes that the user turned off: vLLM turns off the others later."""
        passes = vllm_config.compilation_config.pass_config
        flags = (target.flag for _, target in targets(installed_bindings(), FusionTarget))
        return {"passes_off": [flag for flag in flags if getattr(passes, flag, None) is False]}

    def request(
        self,
        vllm_config: VllmConfig,
        settings: Settings,
        noted: Mapping[str, Any],
        /,
        *,
        compiled: bool,
    ) -> dict[str, Any]:
        return {"passes_off": tuple(noted.get("passes_off", ()))}

    def why_not(self, facts: EngineFacts) -> WhyNot:
        """Return why a pass cannot find its op in this engine."""
        known = targets(installed_bindings(), FusionTarget)
        found = {op: _note(target, facts) for op, target in known}
        return WhyNot({op: why for op, why in found.items() if why})

    def keep_stock(self, plan: Plan) -> dict[str, str]:
        """Return the parts that vLLM's passes look for, and ops that a pass of ours cannot find.

        The parts of a planned op that a pass of vLLM's finds are vLLM's own. An op of vLLM's IR is
        not among them: a graph has it as such until the passes are through. A pass of ours looks
        for a planned part that is an operator of ours, and puts only a kernel there: PyTorch code
        that a compiler reads, it joins with what is around it better than any operator.
        """
        in_ir = ir_ops()
        found: dict[str, str] = {}
        for op, target in planned(plan, FusionTarget):
            parts = [part for part in target.parts if part not in in_ir]
            if _is_there(target):
                why = f"vLLM's pass for {op} looks for vLLM's own"
                found |= {part: why for part in parts if not plan.is_stock(part)}
            elif stock := [part for part in parts if plan.is_stock(part)]:
                found[op] = f"{stock[0]} is vLLM's own code, which no pass finds here"
            elif not any(map(is_opaque, plan.entries[op].firsts)):
                found[op] = "the compiler joins its parts, as its implementation is PyTorch code"
        return found

    def takes_whole(self, plan: Plan) -> frozenset[str]:
        """Return the ops that a pass of ours finds as operators."""
        in_ir = ir_ops()
        parts = (
            part
            for _, target in planned(plan, FusionTarget)
            if not _is_there(target)
            for part in target.parts
        )
        return frozenset(part for part in parts if part not in in_ir)

    def configure(
        self, plan: Plan, vllm_config: VllmConfig, entry: MutableMapping[str, Any]
    ) -> list[str]:
        """Turn on the passes of planned ops, and off those that an earlier plan turned on.

        Returns:
            The layers that these passes look for.
        """
        passes, ours = vllm_config.compilation_config.pass_config, set(entry.get("passes", ()))
        vllms = [
            target for _, target in planned(plan, FusionTarget) if not _finds_ours(plan, target)
        ]
        wanted = {target.flag for target in vllms}
        for flag in ours - wanted:
            setattr(passes, flag, False)
        added = {flag for flag in wanted if not getattr(passes, flag, False)}
        for flag in added:
            setattr(passes, flag, True)
        entry["passes"] = sorted((ours & wanted) | added)
        return [layer for target in vllms for layer in target.layers]

    def by_range(self, plan: Plan) -> dict[str, Chain]:
        return {op: chain for op, (_, chain) in by_range(plan).items()}

    def apply(self, engine: Engine) -> None:
        """Count from now on what the passes of the plan's ops find, for its engine.

        Those of ours are made here, with the operators that they put into graphs: graphs that vLLM
        has in its cache call them, too.
        """
        plan = engine.plan
        engine.state[InGraphs] = graphs = InGraphs()
        for op, target in planned(plan, FusionTarget):
            if _finds_ours(plan, target):
                known = graphs.sites[op] = Sites()
                last = stock_form(op, target.native, plan.contracts[op].consumable)
                operator = operator_of(plan, plan.chain(op, last=last))
                from ..graphs.finding import FindingPass

                assert target.own is not None  # none of ours finds it otherwise
                graphs.passes.append(FindingPass(operator, target.own, known))
                continue
            try:
                cls = named(target.path)
            except Exception as error:
                # A release may have it elsewhere: the flag may work all the same.
                log.warning("Op '%s': what vLLM's pass finds is not counted: %s", op, quote(error))
                continue
            graphs.sites[op] = Sites()
            if cls not in _watched:
                cls.__call__ = _counting(cls.__call__, op)
                _watched.add(cls)

    def compiled(self, engine: Engine) -> None:
        """Log on rank 0 what the passes found: none is worth a warning.

        Of an op that the model does not have, and that the settings name, the report says so.
        """
        plan = engine.plan
        vllms = {op for op, target in planned(plan, FusionTarget) if not _finds_ours(plan, target)}
        for op, known in in_graphs(engine).sites.items() if engine.rank == 0 else ():
            if op not in engine.unused:
                _say(plan.entries[op].label, op, known, "vLLM's" if op in vllms else "the")

    def report(self, engine: Engine) -> dict[str, Any]:
        sites = dict(in_graphs(engine).sites)
        return {"fusions": {op: dataclasses.asdict(known) for op, known in sites.items()}}
