"""The pass of ours by which compiled graphs launch an implementation's kernels themselves.

A pass of vLLM's puts an operator into graphs, whose kernel we override: each call of it runs
Python, and Triton's own launching. Where one implementation with a traced form serves a graph's
whole range of sizes, that form takes the operator's place.

Imported where vLLM makes its pass manager, which is in a worker that compiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx
from torch._inductor.pattern_matcher import Match

from ...contracts.binding import OperatorTarget
from ...engine.ranges import sole
from ...engine.traced import refused
from ...logs import get_logger
from ...plugins.types import OpImpl
from ..engines import Engine
from ..patchers import fusions, operators
from .base import GraphPass, problem_of
from .functional_operators import (
    arguments,
    operator_of,
    own,
    put_in_place,
    replacing,
    written,
)
from .unknowns import as_numbers

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = get_logger("engine")


class TracedForms(GraphPass):
    """The pass, for one engine."""

    def __init__(self, engine: Engine, vllm_config: VllmConfig) -> None:
        super().__init__(engine, vllm_config)
        plan = engine.plan
        self.sites = {
            target.name: (target, chain)  # the operator as the binding knows it, its candidates
            for op, target, chain in fusions.operators(plan)
            if not operators.operator_note(plan, op)
        }
        self._patterns = replacing(
            "vllm_fl_traced_forms", lambda match: self._impl(match) is not None, self._replace
        )

    def __call__(self, graph: fx.Graph) -> None:
        """Put traced forms into one graph, as far as its range of sizes has them."""
        self._patterns.apply(graph)

    def _impl(self, match: Match) -> OpImpl | None:
        """Whose traced form takes the place of an operator; None where it stays."""
        site = self.sites.get(operator_of(match).name())
        impl = None if site is None else sole(site[1], self.sizes)
        return impl if impl is not None and impl.traced is not None else None

    def _replace(self, match: Match, *args: Any, **kwargs: Any) -> None:
        """Put the traced form in an operator's place, or say why that stays."""
        operator, impl = operator_of(match), self._impl(match)
        target, chain = self.sites[operator.name()]
        op, spec = chain.op, chain.spec
        assert impl is not None and impl.traced is not None and spec is not None
        run = target.route(self.engine.plan.record.counting(impl.traced, op, impl.impl_id))

        def code(given: Mapping[str, Any]) -> list[Any]:
            copies = {name: given[name].clone() for name in written(operator)}
            run(*arguments(operator, {**given, **copies}, target.parameters))
            return list(copies.values())

        def launch() -> str:
            (node,) = match.nodes
            values = fx.node.map_arg(node.kwargs, lambda of: of.meta["val"])
            known = arguments(operator, values, target.parameters)
            why = refused(impl, spec, _contract_args(target, as_numbers(known)))
            if not why:
                own(node, op, impl.impl_id)
                put_in_place(match, code)
            return why

        why, counted = problem_of(launch), self.done.sites.get(op)
        if counted is not None and not why:
            counted.launched += 1
        elif why:
            log.warning(
                "Op '%s': graphs for %s tokens do not launch '%s' themselves, but call an operator "
                "that does, which takes the host several times as long: %s",
                op,
                self.sizes,
                impl.impl_id,
                why,
            )


class _Called(Exception):
    """Its `args` are what `_contract_args` is after."""


def _contract_args(target: OperatorTarget, values: Sequence[Any]) -> tuple[Any, ...]:
    """The contract's arguments of a call of the operator.

    Raises:
        ValueError: the call is not the op.
    """

    def op(*args: Any) -> Any:
        raise _Called(*args)

    try:
        target.route(op)(*values)
    except _Called as called:
        return called.args
    raise ValueError(f"this call of {target.name} is not the op")
