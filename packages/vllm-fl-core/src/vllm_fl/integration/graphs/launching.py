"""The pass of ours by which compiled graphs launch an implementation's kernels themselves.

A pass of vLLM puts an operator into graphs, and we override its kernel: each call of that runs
Python, and Triton's own launching. If one implementation with a traced form serves a graph's whole
range of sizes, that form replaces the operator.

Imported where vLLM makes its pass manager, which is in a worker that compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx
from torch._inductor.pattern_matcher import Match
from torch.utils import _pytree as pytree

from ...contracts.binding import OperatorTarget
from ...dispatch.chain import Chain
from ...engine.ranges import sole
from ...engine.traced import functional, refused
from ...plugins.types import OpImpl
from ..engines import Engine
from ..patchers import fusions
from ..patchers.arguments import known
from .base import FUNCTIONAL, GraphPass, patterns
from .unknowns import as_numbers, under_one

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class TracedForms(GraphPass):
    """The pass, for one engine."""

    tasks: dict[str, tuple[OperatorTarget, Chain]]

    def __init__(self, engine: Engine, vllm_config: VllmConfig) -> None:
        super().__init__(engine, vllm_config)
        self.tasks = {
            target.name: (target, chain)  # the operator as the binding knows it, its candidates
            for op, target, chain in fusions.operators(engine.plan)
        }
        self._patterns = patterns(FUNCTIONAL, self._impl, self._replace)

    def __call__(self, graph: fx.Graph) -> None:
        """Count the operators of one graph, and replace those that its range of sizes allows."""
        sites = self.done.sites
        for op in {chain.op for _, chain in self.tasks.values()}:
            sites[op].graphs += 1
        for node in graph.find_nodes(op="call_function", target=FUNCTIONAL):
            if (task := self._task(node)) is not None:
                sites[task[1].op].found += 1
        self._patterns.apply(graph)

    def _task(self, node: fx.Node) -> tuple[OperatorTarget, Chain] | None:
        operator: Any = node.args[0]
        return self.tasks.get(operator.name())

    def _impl(self, node: fx.Node) -> OpImpl | None:
        """Return whose traced form replaces an operator; None if it stays."""
        task = self._task(node)
        impl = None if task is None else sole(task[1], self.sizes)
        return impl if impl is not None and impl.traced is not None else None

    def _replace(self, match: Match, *args: Any, **kwargs: Any) -> None:
        """Replace an operator by the traced form, or log why it stays."""
        (node,) = match.nodes
        operator: Any = node.args[0]
        impl = self._impl(node)
        target, chain = self.tasks[operator.name()]
        assert impl is not None and impl.traced is not None and chain.spec is not None
        run = target.route(self.engine.plan.record.counting(impl.traced, chain.op, impl.impl_id))

        def code(given: Mapping[str, Any]) -> list[Any]:
            copies = {name: given[name].clone() for name in _written(operator)}
            run(*_arguments(operator, {**given, **copies}, target.parameters))
            return list(copies.values())

        def launch() -> str:
            values = fx.node.map_arg(node.kwargs, lambda of: of.meta["val"])
            called = as_numbers(_arguments(operator, values, target.parameters))
            why = refused(impl, chain.spec, _contract_args(target, called))
            if not why:
                _put(match, code)
            return why

        if self.put_code(node, chain.op, impl.impl_id, launch):
            self.done.sites[chain.op].launched += 1


def _written(operator: Any) -> list[str]:
    """Return the arguments that an operator writes over, in the order of its results."""
    of_schema = ((a.name, a.alias_info) for a in operator._schema.arguments)
    return [name for name, alias in of_schema if alias is not None and alias.is_write]


def _arguments(operator: Any, given: Mapping[str, Any], parameters: Sequence[str]) -> list[Any]:
    """Return the operator's arguments for the parameters that its binding knows.

    Raises:
        ValueError: another one is given, with another value than its default.
    """
    defaults = {a.name: a.default_value for a in operator._schema.arguments}
    found = known([*defaults], len(parameters), defaults, (), given)
    if found is None or [*defaults][: len(parameters)] != [*parameters]:
        raise ValueError(f"it is called with more than {', '.join(parameters)}")
    return found


def _put(match: Match, code: Callable[[Mapping[str, Any]], Sequence[Any]]) -> None:
    """Put code instead of an operator that returns nothing.

    Args:
        match: the operator's node, in its functional form.
        code: the operator's arguments by name -> what it writes over, afterwards. It may write over
            copies of its own, and its arguments have one unknown for the number of tokens.

    Raises:
        Exception: the code cannot be traced; the operator stays.
    """
    (node,) = match.nodes
    (_, *flat), structure = pytree.tree_flatten((node.args, node.kwargs))

    def whole(*values: Any) -> tuple[Any, ...]:
        _, given = pytree.tree_unflatten([None, *values], structure)
        return (None, *code(given))

    results = node.meta["val"]
    match.replace_by_example(functional(lambda *values: under_one(whole, values, results)), flat)


class _Called(Exception):
    """Its `args` are the contract's."""


def _contract_args(target: OperatorTarget, values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the contract's arguments of a call of the operator.

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
