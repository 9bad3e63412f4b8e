"""The pass that inlines one implementation of an op with an order by size.

The operator in a graph would choose an implementation in each call. If the graph's range of token
counts (`ranges.py`) has only one traceable choice, the code of that implementation replaces the
operator. This module is imported only in a worker that compiles.
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
from .symbolic_sizes import under_one

if TYPE_CHECKING:
    from vllm.ir.op import IrOp

OWNER = "vllm_fl"
"""The key in a node's `nn_module_stack` that marks the code of an implementation. torch copies it
to the nodes that replace the node. The value is (op, impl id)."""

log = get_logger("engine")


class RangeLowering(GraphPass):
    def find_tasks(self) -> dict[Any, Site]:
        return {**_in_graphs(self.engine.plan), **_in_ir(self.engine.plan)}

    def __call__(self, graph: fx.Graph) -> None:
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
        """Count the operators that are not replaced. Log a warning if all calls of this range have
        the same choice, which could have replaced them."""
        sizes = self.sizes
        impl = choice(chain, sizes)
        is_news = bool(stay) and not self.done.stayed[chain.op, sizes]
        self.done.stayed[chain.op, sizes] += len(stay)
        if impl is None or not is_news or all(self._choice(node) for node in stay):
            return
        log.warning(
            "Op '%s': '%s' is not inlined everywhere in the graphs for %s tokens, since the token "
            "count of some calls is unknown: an operator runs these, which may take several times "
            "as long. One choice for all sizes avoids that",
            chain.op,
            impl.impl_id,
            sizes,
        )

    def _choice(self, node: fx.Node) -> OpImpl | None:
        """Return the implementation that replaces an operator, or None if the operator is kept."""
        site = self.tasks[node.target]
        tokens = site.tokens([_value(arg) for arg in node.args])
        called = None if node.kwargs else _called(tokens, self.sizes, node.graph)
        return None if called is None else choice(site.chain, called)

    def _lower(self, match: Match, *args: Any, **kwargs: Any) -> None:
        """Replace an operator with the code of an implementation, or log why it is kept."""
        (node,) = match.nodes
        site, impl = self.tasks[node.target], self._choice(node)
        assert impl is not None
        op, results = site.chain.op, node.meta["val"]
        modules = node.meta.get("nn_module_stack") or {}
        node.meta["nn_module_stack"] = {**modules, OWNER: (op, impl.impl_id)}
        try:
            # torch's passes over the new code remove copies. Without functionalisation, an
            # implementation that writes to its copy would then overwrite the argument.
            run = site.inlined(impl)
            pure = torch.func.functionalize(
                lambda *args: under_one(run, args, results), remove="mutations"
            )
            match.replace_by_example(pure, node.args)
        except Exception as error:
            node.meta["nn_module_stack"] = modules
            log.warning(
                "Op '%s': graphs for %s tokens cannot inline '%s' and run it as an operator, which "
                "takes several times as much host time: %s",
                op,
                self.sizes,
                impl.impl_id,
                quote(error),
            )
        else:
            self.done.inlined[op, self.sizes, impl.impl_id] += 1


def _in_graphs(plan: Plan) -> dict[Any, Site]:
    return {target: site for target, site in ordered().items() if site.chain.record is plan.record}


def _in_ir(plan: Plan) -> dict[Any, Site]:
    """Return the IR ops with an order by size. Without this pass, vLLM would lower them to
    vllm-fl's provider later."""
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
    """Return the token counts of an operator's calls in a graph; None if they are unknown. Graph
    inputs that no traced operation has combined have different symbols. vLLM replaces all of them
    by the number of tokens (`create_concrete_args`)."""
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
