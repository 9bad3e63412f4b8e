"""The pass of ours that replaces operators of PyTorch or vLLM in graphs by planned ops.

In the graphs of a range of sizes that is left to the operator nothing changes. Our operator decides
about refusals when it is called: its last candidate is the operator of PyTorch or vLLM.

It runs before ops of vLLM's IR are lowered: these are still single nodes.

Imported where vLLM makes its pass manager, which is in a worker that compiles.
"""

from __future__ import annotations

from torch import fx

from ...contracts.binding import new_node
from ...engine.ranges import choice
from .base import FUNCTIONAL, GraphPass
from .state import Sought


class TorchOperators(GraphPass):
    """Puts the operator where the op's binding finds an operator."""

    def find_tasks(self) -> list[Sought]:
        return self.done.sought

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
        result = new_node(graph, each.operator, *args)
        # A functional form's users take the one result out of a pair.
        uses = [*node.users, node] if node.target is FUNCTIONAL else [node]
        for use in uses:
            use.replace_all_uses_with(result)
            graph.erase_node(use)
        return True
