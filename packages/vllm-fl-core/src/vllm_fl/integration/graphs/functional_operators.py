"""Operators that write over arguments, as vLLM's graphs have them: in their functional form.

That returns what the operator returns, and a tensor for each argument that it writes over. What
takes its place returns the same.

Imported where vLLM makes its pass manager, which is in a worker that compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.pattern_matcher import (
    CallFunctionVarArgs,
    Match,
    PatternMatcherPass,
    register_graph_pattern,
)
from torch.utils import _pytree as pytree

from ...engine.traced import functional
from ..patchers.arguments import known
from .unknowns import under_one

OWNER = "vllm_fl"
"""Where a node of a graph says whose code it is: beside the modules that it stands in, which torch
hands on to what takes the node's place. Its value is (op, impl id)."""


def own(node: fx.Node, op: str, impl_id: str) -> None:
    """Say that what takes the node's place is the code of an implementation."""
    node.meta["nn_module_stack"] = {
        **(node.meta.get("nn_module_stack") or {}),
        OWNER: (op, impl_id),
    }


def replacing(
    name: str, wanted: Callable[[Match], bool], replace: Callable[..., None]
) -> PatternMatcherPass:
    """A pass that calls `replace` with the match of each functional operator that is `wanted`.

    Args:
        name: the pass's, in torch's logs.
        wanted, replace: as torch's pattern matcher has them.
    """
    patterns = PatternMatcherPass(pass_name=name)
    register_graph_pattern(
        CallFunctionVarArgs(torch.ops.higher_order.auto_functionalized),
        extra_check=wanted,
        pass_dict=patterns,
    )(replace)
    return patterns


def operator_of(match: Match) -> Any:
    """The operator of which the node is the functional form."""
    (node,) = match.nodes
    return node.args[0]


def written(operator: Any) -> list[str]:
    """The arguments that an operator writes over, in the order of its results."""
    known = ((a.name, a.alias_info) for a in operator._schema.arguments)
    return [name for name, alias in known if alias is not None and alias.is_write]


def arguments(operator: Any, given: Mapping[str, Any], parameters: Sequence[str]) -> list[Any]:
    """The operator's arguments for the parameters that somebody knows: its first ones, in order.

    Raises:
        ValueError: another one is given, whose value is not its default.
    """
    schema = operator._schema.arguments
    defaults = {a.name: a.default_value for a in schema}
    found = known([*defaults], len(parameters), defaults, (), given)
    if found is None or [*defaults][: len(parameters)] != [*parameters]:
        raise ValueError(f"it is called with more than {', '.join(parameters)}")
    return found


def put_in_place(match: Match, code: Callable[[Mapping[str, Any]], Sequence[Any]]) -> None:
    """Put code in the place of an operator that returns nothing.

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
