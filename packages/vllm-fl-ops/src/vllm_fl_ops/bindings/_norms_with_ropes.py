"""Finds norms with a rope behind them in graphs, on devices for which vLLM has no such pass."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.fx import Graph, Node

__all__ = ["put_operator"]

ROPE = ("query", "key", "cos", "sin", "position_ids", "rotary_interleaved")
"""The parameters of the rope's operator with a key."""


@cache
def _splits() -> Mapping[Any, dict[str, Any]]:
    """What gives columns of a tensor -> its parameters behind that, with their defaults."""
    from torch import ops

    return {
        ops.aten.slice.Tensor: {"dim": 0, "start": None, "stop": None, "step": 1},
        ops.aten.split.Tensor: {"sizes": 0, "dim": 0},
        ops.aten.split_with_sizes.default: {"sizes": (), "dim": 0},
    }


@dataclass(frozen=True)
class _Normed:
    """Heads that a norm has made of columns of a projection.

    Args:
        projection: (tokens, features).
        start, stop: which features.
        size: features of one head.
        weight: (size,).
        epsilon: the norm's.
    """

    projection: Node
    start: int
    stop: int
    size: int
    weight: Node
    epsilon: float


def put_operator(graph: Graph, node: Node, fused: Callable[..., Any]) -> bool:
    """Put the op where query and key heads of one projection are normed, then turned by `node`.

    The projection is left as it was: what else reads it, or the normed heads, is not asked.

    Args:
        graph: the graph.
        node: a node of it.
        fused: the op's operator, of the contract's schema.

    Returns:
        Whether it was put there.
    """
    found = _found(node)
    if found is not None:
        _replace(graph, node, fused, *found)
    return found is not None


def _replace(
    graph: Graph,
    rope: Node,
    fused: Callable[..., Any],
    normed: tuple[_Normed, ...],
    args: tuple[Any, ...],
) -> None:
    """Put the op before `rope`, and its columns in the place of what that has turned."""
    import torch

    from vllm_fl.contracts.binding import new_node

    with graph.inserting_before(rope):
        result = new_node(graph, fused, *args)
        turned = []
        for x in normed:
            columns = new_node(graph, torch.ops.aten.slice.Tensor, result, 1, x.start, x.stop)
            heads = [-1, (x.stop - x.start) // x.size, x.size]
            turned.append(new_node(graph, torch.ops.aten.reshape.default, columns, heads))
    for user in list(rope.users):
        _, which = user.args
        user.replace_all_uses_with(turned[which])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(rope)


def _found(node: Node) -> tuple[tuple[_Normed, ...], tuple[Any, ...]] | None:
    """(query and key, the arguments of the op) for a rope that has norms before it."""
    import torch

    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "vllm_fl":
        return None
    names = tuple(argument.name for argument in node.target._schema.arguments)
    parts = all(user.target is operator.getitem for user in node.users)
    if names != ROPE or node.kwargs or not parts:
        return None
    given = {"rotary_interleaved": False, **dict(zip(names, node.args, strict=False))}
    q, k, table = _normed(given["query"]), _normed(given["key"]), _table(given["cos"], given["sin"])
    if q is None or k is None or table is None:
        return None
    one_projection = q.projection is k.projection and (q.start, q.stop) == (0, k.start)
    if not one_projection or (q.size, q.epsilon) != (k.size, k.epsilon):
        return None
    heads = ((x.stop - x.start) // x.size for x in (q, k))
    rest = (q.weight, k.weight, table, given["position_ids"], *heads, q.epsilon)
    return (q, k), (q.projection, *rest, given["rotary_interleaved"])


def _normed(heads: Any) -> _Normed | None:
    """What a norm of heads has made `heads` of; None for anything else."""
    import torch

    norm = _behind_views(heads)
    if norm.target is not torch.ops.vllm_ir.rms_norm.default or norm.kwargs:
        return None
    given: Any = norm.args
    x, weight, epsilon, *variance_size = given
    columns = _columns(_behind_views(x))
    if columns is None or weight is None or any(variance_size):
        return None
    projection, start, stop = columns
    _, count, size = _shape(heads)
    widths = {*_shape(weight), _shape(x)[-1], size}
    if widths != {size} or count * size != stop - start or (_shape(projection)[1] - start) % size:
        return None
    return _Normed(projection, start, stop, size, weight, epsilon)


def _table(cos: Any, sin: Any) -> Node | None:
    """The table whose left half is `cos` and whose right half is `sin`."""
    left, right = _columns(cos), _columns(sin)
    if left is None or right is None:
        return None
    table, start, half = left
    whole = start == 0 and right == (table, half, 2 * half) and _shape(table)[1] == 2 * half
    return table if whole else None


def _columns(part: Any) -> tuple[Node, int, int] | None:
    """(a tensor of two dimensions, the first column, the last + 1) of which `part` is a view."""
    if part.target is operator.getitem:
        part, index = part.args
    known = _splits().get(part.target)
    if known is None:
        return None
    given = {**known, **dict(zip(("source", *known), part.args, strict=False))}
    source, sizes, step = given["source"], given.get("sizes"), given.get("step", 1)
    if len(_shape(source)) != 2 or given["dim"] not in (-1, 1) or step != 1:
        return None
    bounds = sizes if isinstance(sizes, list) else (given.get("start"), given.get("stop"), sizes)
    if any(hasattr(bound, "meta") for bound in bounds):  # known when it runs
        return None
    if sizes is None:
        start, stop, _ = slice(given["start"], given["stop"]).indices(_shape(source)[1])
    elif isinstance(sizes, int):
        start, stop = index * sizes, (index + 1) * sizes
    else:
        start, stop = sum(sizes[:index]), sum(sizes[: index + 1])
    return source, start, min(stop, _shape(source)[1])


def _behind_views(node: Any) -> Node:
    import torch

    while node.target in (torch.ops.aten.reshape.default, torch.ops.aten.view.default):
        node = node.args[0]
    found: Node = node
    return found


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)
