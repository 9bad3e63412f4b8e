"""Places that we take: graphs of vLLM's compiler, on devices for which vLLM has no such pass.

These passes run behind vLLM's own (`passes.py`), before ops of vLLM's IR are lowered: so norms are
still single nodes. Rotary embeddings are operators of ours there (`Plan.whole`).
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from vllm.compilation.passes.inductor_pass import InductorPass

from .fusions import Sites

__all__ = ["QKNormRopePass", "new_node"]

VIEWS = (torch.ops.aten.reshape.default, torch.ops.aten.view.default)
SPLITS: dict[Any, dict[str, Any]] = {
    torch.ops.aten.slice.Tensor: {"dim": 0, "start": None, "stop": None, "step": 1},
    torch.ops.aten.split.Tensor: {"sizes": 0, "dim": 0},
    torch.ops.aten.split_with_sizes.default: {"sizes": (), "dim": 0},
}
"""What gives columns of a tensor -> its parameters behind that, with their defaults."""

ROPE = ("query", "key", "cos", "sin", "position_ids", "rotary_interleaved")
"""The parameters of the contract's operator with a key."""


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

    projection: fx.Node
    start: int
    stop: int
    size: int
    weight: fx.Node
    epsilon: float


class QKNormRopePass(InductorPass):  # type: ignore[misc]
    """Puts `qk_norm_rope` where query and key heads of one projection are normed, then turned.

    The projection is left as it was: what else reads it, or the normed heads, is not asked.

    Args:
        fused: the op's operator, of the contract's schema.
        sites: what is counted.
    """

    def __init__(self, fused: Callable[..., Any], sites: Sites) -> None:
        self.fused = fused
        self.sites = sites

    def uuid(self) -> str:
        """Another one for other code and for another operator."""
        return str(self.hash_source(inspect.getsource(sys.modules[__name__]), str(self.fused)))

    def __call__(self, graph: fx.Graph) -> None:
        self.sites.graphs += 1
        for node in list(graph.nodes):
            found = _found(node)
            if found is not None:
                _replace(graph, node, self.fused, *found)
                self.sites.found += 1


def _replace(
    graph: fx.Graph,
    rope: fx.Node,
    fused: Callable[..., Any],
    normed: tuple[_Normed, ...],
    args: tuple[Any, ...],
) -> None:
    """Put the op before `rope`, and its columns in the place of what that has turned."""
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


def _found(node: fx.Node) -> tuple[tuple[_Normed, ...], tuple[Any, ...]] | None:
    """(query and key, the arguments of `qk_norm_rope`) for a rope that has norms before it."""
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


def _table(cos: Any, sin: Any) -> fx.Node | None:
    """The table whose left half is `cos` and whose right half is `sin`."""
    left, right = _columns(cos), _columns(sin)
    if left is None or right is None:
        return None
    table, start, half = left
    whole = start == 0 and right == (table, half, 2 * half) and _shape(table)[1] == 2 * half
    return table if whole else None


def _columns(part: Any) -> tuple[fx.Node, int, int] | None:
    """(a tensor of two dimensions, the first column, the last + 1) of which `part` is a view."""
    if part.target is operator.getitem:
        part, index = part.args
    known = SPLITS.get(part.target)
    if known is None:
        return None
    given = {**known, **dict(zip(("source", *known), part.args, strict=False))}
    source, sizes, step = given["source"], given.get("sizes"), given.get("step", 1)
    if len(_shape(source)) != 2 or given["dim"] not in (-1, 1) or step != 1:
        return None
    bounds = sizes if isinstance(sizes, list) else (given.get("start"), given.get("stop"), sizes)
    if any(isinstance(bound, fx.Node) for bound in bounds):  # known when it runs
        return None
    if sizes is None:
        start, stop, _ = slice(given["start"], given["stop"]).indices(_shape(source)[1])
    elif isinstance(sizes, int):
        start, stop = index * sizes, (index + 1) * sizes
    else:
        start, stop = sum(sizes[:index]), sum(sizes[: index + 1])
    return source, start, min(stop, _shape(source)[1])


def _behind_views(node: Any) -> fx.Node:
    while node.target in VIEWS:
        node = node.args[0]
    found: fx.Node = node
    return found


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def new_node(graph: fx.Graph, target: Callable[..., Any], *args: Any) -> fx.Node:
    """A node with the fake value that the passes behind this one read."""
    node = graph.call_function(target, args)
    values: Any = fx.node.map_arg(args, lambda of: of.meta["val"])
    fake: Any = detect_fake_mode(values)
    with unset_fake_temporarily(), fake:
        node.meta["val"] = target(*values)
    return node
