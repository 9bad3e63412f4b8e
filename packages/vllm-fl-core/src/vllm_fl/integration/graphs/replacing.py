"""The pass of ours that puts a planned op in the place of an operator of PyTorch's or vLLM's.

In the graphs of a range of sizes that is left to the operator nothing changes: they are compiled as
without us. Nor where every candidate refuses a call: what it is refused for, its dtype or layout,
the graph tells already. In strict mode a refusal is an error: the operator that raises it stands
there.

Imported where vLLM makes its pass manager, which is in a worker that compiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ...contracts.binding import new_node
from ...dispatch.chain import Chain, refusal
from ...dispatch.resolver import STOCK
from ...engine.ranges import choice
from ...logs import get_logger
from ...plugins.forms import verdict_of
from ...plugins.types import OpImpl
from ...text import clean
from ..engines import Engine
from ..patchers.torch_operators import Replaced
from .base import GraphPass
from .unknowns import as_numbers

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FUNCTIONAL = torch.ops.higher_order.auto_functionalized

log = get_logger("engine")


class TorchOperators(GraphPass):
    """The pass, for one engine."""

    def __init__(self, engine: Engine, vllm_config: VllmConfig) -> None:
        super().__init__(engine, vllm_config)
        self._said: set[tuple[str, str]] = set()

    def __call__(self, graph: fx.Graph) -> None:
        """Put the ops into one graph, as far as its range of sizes has them.

        From its end to its beginning: an op that takes several operators in is found at the last
        of them, before another op is put in the place of one. What nothing reads then goes.
        """
        sizes = self.sizes
        planned = [each for each in self.done.replaced if choice(each.chain, sizes) is None]
        for each in planned:
            each.sites.graphs += 1
        for node in reversed([*graph.nodes] if planned else []):
            if node.op != "call_function":
                continue
            if not node.users and not node.is_impure():
                graph.erase_node(node)
                continue
            called = node.args[0] if node.target is FUNCTIONAL else node.target
            for each in planned:
                if str(called) in each.target.operators:
                    with graph.inserting_before(node):
                        found = self._replace(graph, node, each)
                    each.sites.found += found
                    if found:
                        break

    def _replace(self, graph: fx.Graph, node: fx.Node, each: Replaced) -> bool:
        """Put the op in the place of a call; whether that was done."""
        args = each.target.find(node)
        if args is None:
            return False
        if not each.chain.strict and self._is_refused(each, args):
            for made in args:
                if isinstance(made, fx.Node) and not made.users:
                    graph.erase_node(made)
            return False
        result = new_node(graph, each.operator, *args)
        # A functional form's users take the one result out of a pair.
        uses = [*node.users, node] if node.target is FUNCTIONAL else [node]
        for use in uses:
            use.replace_all_uses_with(result)
            graph.erase_node(use)
        return True

    def _is_refused(self, each: Replaced, args: tuple[Any, ...]) -> bool:
        """Whether every candidate refuses such calls, each reason said once."""
        values = as_numbers(fx.node.map_arg(args, lambda of: of.meta["val"]))
        whys = {impl.impl_id: _refusal(each.chain, impl, values) for impl in _asked(each.chain)}
        if not all(whys.values()):
            return False
        for impl_id, why in whys.items():
            if (impl_id, why) not in self._said:
                self._said.add((impl_id, why))
                log.info(
                    "Op '%s': '%s' does not support a call of the model's graphs; the operator "
                    "stays there: %s",
                    each.chain.op,
                    impl_id,
                    why,
                )
        return True


def _asked(chain: Chain) -> Iterator[OpImpl]:
    """The candidates of all rows, vLLM's own form apart."""
    every = (impl for _, impls in chain.rows for impl in impls)
    return (impl for impl in every if impl.impl_id != STOCK.impl_id)


def _refusal(chain: Chain, impl: OpImpl, values: Any) -> str:
    """Why an implementation takes no such call; empty if it may."""
    try:
        verdict = verdict_of(impl, chain.spec, values)
    except Exception:  # it is asked about tensors without memory: the call itself will tell
        return ""
    return "" if verdict is True else clean(refusal(verdict))
