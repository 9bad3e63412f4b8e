"""The pass of ours that replaces operators of PyTorch or vLLM in graphs by planned ops.

In the graphs of a range of sizes that is left to the operator nothing changes; nor if every
candidate refuses a call for its dtype or layout, which the graph shows. In strict mode a refusal is
an error: our operator raises it.

It runs before ops of vLLM's IR are lowered: these are still single nodes.

Imported where vLLM makes its pass manager, which is in a worker that compiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

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
from .base import FUNCTIONAL, GraphPass
from .state import Sought
from .unknowns import as_numbers

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = get_logger("engine")


class TorchOperators(GraphPass):
    """Puts the operator where the op's binding finds an operator."""

    tasks: list[Sought]

    def __init__(self, engine: Engine, vllm_config: VllmConfig) -> None:
        super().__init__(engine, vllm_config)
        self.tasks = self.done.sought
        self._said: set[tuple[str, str]] = set()

    def __call__(self, graph: fx.Graph) -> None:
        """Put the ops into one graph, as far as its range of sizes has them.

        From its end to its beginning: an op that takes several operators in is found at the last
        of them, before another op replaces one of them. What nothing reads is then erased.
        """
        planned = [each for each in self.tasks if choice(each.chain, self.sizes) is None]
        for each in planned:
            self.done.sites[each.chain.op].graphs += 1
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
                    self.done.sites[each.chain.op].found += found
                    if found:
                        break

    def _replace(self, graph: fx.Graph, node: fx.Node, each: Sought) -> bool:
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

    def _is_refused(self, each: Sought, args: tuple[Any, ...]) -> bool:
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
