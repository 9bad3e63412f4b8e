"""The pass that replaces operators of PyTorch or vLLM in graphs with planned ops.

It does not change graphs for sizes that the plan assigns to the original operator. That operator is
also the op's last candidate. The pass runs before vLLM lowers its IR ops, while they are single
nodes. This module is imported only in a worker that compiles.
"""

from __future__ import annotations

from torch import fx

from ...contracts.binding import new_node
from .base import FUNCTIONAL, GraphPass
from .ranges import compiled_range, is_stock
from .state import Sought


class TorchOperators(GraphPass):
    def find_tasks(self) -> list[Sought]:
        return self.done.sought

    def __call__(self, graph: fx.Graph) -> None:
        """Replace operators in one graph, for ops that are planned for its range of sizes. The
        graph is walked backwards, so an op of several operators is found at its last operator
        before another op replaces any of them. Unused nodes are erased on the way."""
        sizes = compiled_range(self.config)
        planned = [each for each in self.tasks if not is_stock(each.chain, sizes)]
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
        """Replace a call if it computes the op. Return whether it was replaced."""
        args = each.target.find(node)
        if args is None:
            return False
        result = new_node(graph, each.operator, *args)
        # The users of a functional form are getitems of its only result.
        uses = [*node.users, node] if node.target is FUNCTIONAL else [node]
        for use in uses:
            use.replace_all_uses_with(result)
            graph.erase_node(use)
        return True
