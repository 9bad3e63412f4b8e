"""The pass of ours by which an op that is ordered by size becomes code of one implementation.

vLLM traces a model once and compiles its graphs for each range of token counts (`ranges.py` says
where we split them). In the graph of a range with one traceable choice, that code replaces the
operator that would look its row up; elsewhere the operator stays.

Imported where vLLM makes its pass manager, which is in a worker that compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._inductor.pattern_matcher import (
    CallFunctionVarArgs,
    Match,
    PatternMatcherPass,
    register_graph_pattern,
)
from torch.fx.experimental.symbolic_shapes import free_symbols

from ...dispatch.chain import Chain
from ...engine.opaque import Site, inlined, ordered
from ...engine.plan import Plan
from ...engine.ranges import Range, choice
from ...logs import get_logger
from ...plugins.types import OpImpl
from ...text import quote
from ..patchers.ir import chain_of, ir_op_of, ir_ops
from .base import GraphPass
from .unknowns import under_one

if TYPE_CHECKING:
    from vllm.ir.op import IrOp

OWNER = "vllm_fl"
"""Marks a node's code as an implementation's: a key next to the modules that it is of, which torch
passes on to the nodes that replace it. Its value is (op, impl id)."""

log = get_logger("engine")


class RangeLowering(GraphPass):
    """The pass, for one engine."""

    def find_tasks(self) -> dict[Any, Site]:
        return {**_in_graphs(self.engine.plan), **_in_ir(self.engine.plan)}

    def __call__(self, graph: fx.Graph) -> None:
        """Replace the operators of one graph by code, as far as its range allows."""
        patterns = PatternMatcherPass()
        register_graph_pattern(
            CallFunctionVarArgs(list(self.tasks)),
            extra_check=lambda match: self._choice(match.nodes[0]) is not None,
            pass_dict=patterns,
        )(self._lower)
        patterns.apply(graph)
        for target, site in self.tasks.items():
            self._note(site.chain, graph.find_nodes(op="call_function", target=target))

    def _note(self, chain: Chain, stay: Sequence[fx.Node]) -> None:
        """Count the operators that stay, and log those that one choice would have served."""
        sizes = self.sizes
        impl = choice(chain, sizes)
        is_news = bool(stay) and not self.done.stayed[chain.op, sizes]
        self.done.stayed[chain.op, sizes] += len(stay)
        if impl is None or not is_news or all(self._choice(node) for node in stay):
            return
        log.warning(
            "Op '%s': '%s' is not inlined everywhere in the graphs for %s tokens, since they do "
            "not tell how many tokens each call has: an operator calls it there, which may take "
            "several times as long. One choice for all sizes avoids that",
            chain.op,
            impl.impl_id,
            sizes,
        )

    def _choice(self, node: fx.Node) -> OpImpl | None:
        """Return whose code replaces an operator; None if it stays."""
        site = self.tasks[node.target]
        tokens = site.tokens([_value(arg) for arg in node.args])
        called = None if node.kwargs else _called(tokens, self.sizes, node.graph)
        return None if called is None else choice(site.chain, called)

    def _lower(self, match: Match, *args: Any, **kwargs: Any) -> None:
        """Replace an operator by an implementation's code, or log why it stays."""
        (node,) = match.nodes
        site, impl = self.tasks[node.target], self._choice(node)
        assert impl is not None
        op, results = site.chain.op, node.meta["val"]
        modules = node.meta.get("nn_module_stack") or {}
        node.meta["nn_module_stack"] = {**modules, OWNER: (op, impl.impl_id)}
        try:
            # The passes that torch runs on the new code remove copies, and with them what keeps an
            # argument from what the implementation writes into its copy.
            run = site.inlined(impl)
            pure = torch.func.functionalize(
                lambda *args: under_one(run, args, results), remove="mutations"
            )
            match.replace_by_example(pure, node.args)
        except Exception as error:
            node.meta["nn_module_stack"] = modules
            log.warning(
                "Op '%s': graphs for %s tokens call an operator that runs '%s', which takes the "
                "host several times as long as its code in the graph: %s",
                op,
                self.sizes,
                impl.impl_id,
                quote(error),
            )
        else:
            self.done.inlined[op, self.sizes, impl.impl_id] += 1


def _in_graphs(plan: Plan) -> dict[Any, Site]:
    """The operators that stand in traced graphs for layers' ops."""
    return {target: site for target, site in ordered().items() if site.chain.record is plan.record}


def _in_ir(plan: Plan) -> dict[Any, Site]:
    """The ops of vLLM's IR, which it would lower to our provider afterwards."""
    found: dict[Any, Site] = {}
    for op, of_op in ir_ops().items():
        if plan.is_stock(op) or not plan.entries[op].ceilings:
            continue
        chain = chain_of(plan, op, of_op)
        for target in of_op:
            ir_op: IrOp = ir_op_of(target)
            found[ir_op.torch_op] = _ir_site(chain, target.route, ir_op)
    return found


def _ir_site(chain: Chain, route: Callable[..., Any], ir_op: Any) -> Site:
    def with_defaults(run: Callable[..., Any]) -> Callable[..., Any]:
        routed = route(run)
        return lambda *args: routed(*ir_op.apply_arg_defaults(args))

    tokens = with_defaults(lambda *args: chain.spec.tokens(args))
    return Site(
        chain,
        lambda args: tokens(*args),
        lambda impl: with_defaults(inlined(chain, impl)),
    )


def _value(arg: Any) -> Any:
    return arg.meta["val"] if isinstance(arg, fx.Node) else arg


def _symbols(placeholder: fx.Node) -> set[Any]:
    value = placeholder.meta.get("val")
    return set(free_symbols(value)) if isinstance(value, torch.SymInt | torch.Tensor) else set()


def _called(tokens: Any, sizes: Range, graph: fx.Graph) -> Range | None:
    """Return the token counts of an operator's calls in a graph; None if they are unknown.

    Inputs that no traced operation has joined have unknowns of their own. To vLLM each is its
    number of tokens: it replaces all of them by that when it compiles for a single size
    (create_concrete_args).

    Args:
        tokens: the count as the graph has it: a number, or an expression of its unknowns.
        sizes: the token counts for which the graph is compiled.
        graph: the graph.
    """
    if isinstance(tokens, int):
        return Range(tokens, tokens)
    count = tokens.node.expr
    if count.is_Integer:
        return Range(int(count), int(count))
    symbols = {s for node in graph.find_nodes(op="placeholder") for s in _symbols(node)}
    if len(count.free_symbols) != 1 or not count.free_symbols <= symbols:
        return None
    (symbol,) = count.free_symbols
    if not count.is_polynomial(symbol) or count.as_poly(symbol).degree() != 1:
        return None
    ends = sorted(int(count.subs(symbol, n)) for n in (sizes.first, sizes.last))
    return Range(*ends)
