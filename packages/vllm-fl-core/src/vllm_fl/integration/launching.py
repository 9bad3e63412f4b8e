"""The pass of ours by which compiled graphs launch an implementation's kernels themselves.

A pass of vLLM's puts an operator into graphs, whose kernel we override: each call of it runs
Python, and Triton's own launching. Where one implementation with a traced form serves a graph's
whole range of sizes, that form takes the operator's place.

Imported where vLLM makes its pass manager, which is in a worker that compiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._inductor.pattern_matcher import (
    CallFunctionVarArgs,
    Match,
    PatternMatcherPass,
    register_graph_pattern,
)
from torch.utils import _pytree as pytree
from vllm.compilation.passes.inductor_pass import InductorPass

from ..contracts.binding import OperatorPlace
from ..dispatch.guard import Chain
from ..engine.plan import Plan
from ..engine.ranges import sole
from ..engine.traced import functional, refused
from ..logs import get_logger
from ..plugins.types import OpImpl
from ..text import quote
from . import ranges
from .planning import digest_of
from .seams import fusions, operators
from .unknowns import as_numbers, under_one

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["TracedForms"]

log = get_logger("engine")


@dataclass(frozen=True)
class _Site:
    """An operator that a pass of vLLM's puts into graphs.

    Args:
        op: what it is.
        place: the operator, as the op's binding knows it.
        chain: the op's candidates, by rows.
    """

    op: str
    place: OperatorPlace
    chain: Chain


class TracedForms(InductorPass):  # type: ignore[misc]
    """The pass, for one engine.

    Args:
        plan: the engine's.
        vllm_config: the engine's.
    """

    def __init__(self, plan: Plan, vllm_config: VllmConfig) -> None:
        self.plan, self.config = plan, vllm_config
        self.sites = {
            place.name: _Site(op, place, chain)
            for op, place, chain in fusions.operators(plan)
            if not operators.operator_note(plan, op)
        }
        self._patterns = PatternMatcherPass(pass_name="vllm_fl_traced_forms")
        register_graph_pattern(
            CallFunctionVarArgs(torch.ops.higher_order.auto_functionalized),
            extra_check=lambda match: self._impl(match) is not None,
            pass_dict=self._patterns,
        )(self._replace)

    def __call__(self, graph: fx.Graph) -> None:
        """Put traced forms into one graph, as far as its range of sizes has them."""
        self._patterns.apply(graph)

    def uuid(self) -> str:
        """What the compiler's caches know the pass by: its source, and the plan's digest."""
        return f"{InductorPass.hash_source(self)}|{digest_of(self.config)}"

    def _impl(self, match: Match) -> OpImpl | None:
        """Whose traced form takes the place of an operator; None where it stays."""
        site = self.sites.get(_operator(match).name())
        impl = None if site is None else sole(site.chain, ranges.now(self.config))
        return impl if impl is not None and impl.traced is not None else None

    def _replace(self, match: Match, *args: Any, **kwargs: Any) -> None:
        """Put the traced form in its place. A functional operator's first result is its own, of
        which there is none, and the others are what it writes over."""
        (node,) = match.nodes
        operator, impl = _operator(match), self._impl(match)
        site, sizes = self.sites[operator.name()], ranges.now(self.config)
        assert impl is not None and impl.traced is not None and site.chain.spec is not None
        run = self.plan.counting(impl.traced, site.op, impl.impl_id)
        written = [a.name for a in operator._schema.arguments if _is_written(a)]
        (_, *flat), structure = pytree.tree_flatten((args, kwargs))

        def code(*values: Any) -> tuple[Any, ...]:
            _, given = pytree.tree_unflatten([None, *under_one(values)], structure)
            own = {name: given[name].clone() for name in written}
            site.place.route(run)(*_known(site.place, operator, {**given, **own}))
            return (None, *own.values())

        try:
            values = fx.node.map_arg(node.kwargs, lambda of: of.meta["val"])
            known = as_numbers(_known(site.place, operator, values))
            called = _contract_args(site.place, known)
            why = refused(impl, site.chain.spec, called)
            if not why:
                match.replace_by_example(functional(code), flat)
        except Exception as error:  # it may raise anything; the operator serves as well
            why = quote(error)
        counted = fusions.sites(self.plan).get(site.op)
        if counted is not None and not why:
            counted.launched += 1
        elif why:
            log.warning(
                "Op '%s': graphs for %s tokens do not launch '%s' themselves, but call an operator "
                "that does, which takes the host several times as long: %s",
                site.op,
                sizes,
                impl.impl_id,
                why,
            )


class _Called(Exception):
    """What `_contract_args` is after."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        super().__init__()
        self.call = args


def _contract_args(place: OperatorPlace, values: Sequence[Any]) -> tuple[Any, ...]:
    """The contract's arguments of a call of the operator.

    Raises:
        ValueError: the call is not the op.
    """

    def op(*args: Any) -> Any:
        raise _Called(args)

    try:
        place.route(op)(*values)
    except _Called as called:
        return called.call
    raise ValueError(f"this call of {place.name} is not the op")


def _known(place: OperatorPlace, operator: Any, given: Mapping[str, Any]) -> list[Any]:
    """The operator's arguments that the binding knows, in its order.

    Raises:
        ValueError: another one is given, whose value is not its default.
    """
    found = {}
    for argument in operator._schema.arguments:
        name = argument.name
        found[name] = given.get(name, argument.default_value)
        if name not in place.parameters and found[name] != argument.default_value:
            raise ValueError(f"{name}={found[name]}")
    return [found[name] for name in place.parameters]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _operator(match: Match) -> Any:
    """The operator of which the node is the functional form."""
    (node,) = match.nodes
    return node.args[0]
