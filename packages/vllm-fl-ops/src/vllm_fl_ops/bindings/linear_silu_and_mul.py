"""Where vLLM runs `linear_silu_and_mul`: an MLP's first product and its activation, in the graphs
that it compiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.binding import Binding, GraphPlace

from ..contracts.rules import HIDDEN
from ._models import mentions
from .linear import BINDING as LINEAR
from .linear import DENSE_INTERMEDIATE, OPERATORS, may_have, product_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]

GATE = "gate"
SILU = (
    "aten.div.Tensor",
    GATE,
    ("aten.add.Tensor", ("aten.exp.default", ("aten.neg.default", GATE)), 1),
)
"""What Inductor makes of it: an operator, and its arguments. Of halves, float32 goes through it."""


def _native(x: Tensor, weight: Tensor) -> Tensor:
    from torch.nn.functional import linear, silu

    gate, up = linear(x, weight).chunk(2, dim=-1)
    return silu(gate) * up


def _find(node: Any) -> tuple[Any, ...] | None:
    """x and weight of silu(gate) * up, the halves of one product, of which nothing else is read."""
    for activated, up in (node.args, node.args[::-1]):
        gate = _gate_of(activated)
        product = _whole_of(gate, first=True)
        if product is None or product is not _whole_of(up, first=False):
            continue
        taken_in = {gate, up, gate.args[0]}
        is_alone = all(of.users.keys() <= taken_in | {node} for of in (product, activated, up))
        is_rounded = node.meta["val"].dtype == product.meta["val"].dtype
        if is_alone and is_rounded and str(product.target) in OPERATORS:
            x, weight, bias = product_of(product) or (None, None, None)
            return None if x is None or bias is not None else (x, weight)
    return None


def _gate_of(activated: Any) -> Any:
    """What a node is silu of; None if it is of nothing."""
    if _target(activated) == "aten.silu.default":
        return activated.args[0]
    quotient = _as_it_was(activated)
    if _target(quotient) != SILU[0] or not _is(quotient, SILU, quotient.args[0]):
        return None
    return _as_it_was(quotient.args[0])


def _is(part: Any, formula: Any, gate: Any) -> bool:
    """Whether a node computes a formula of `gate`, or a number is its."""
    if not isinstance(formula, tuple):
        return part is gate if formula is GATE else bool(part == formula)
    name, *factors = formula
    if _target(part) != name or part.kwargs or len(part.args) != len(factors):
        return False
    return all(_is(*each, gate) for each in zip(part.args, factors, strict=True))


def _as_it_was(node: Any) -> Any:
    """A node before it was made another dtype."""
    is_converted = _target(node) == "prims.convert_element_type.default"
    return node.args[0] if is_converted else node


def _whole_of(half: Any, first: bool) -> Any:
    """The matrix whose first or second half of columns a node is; None if it is none."""
    match _target(half):
        case "aten.slice.Tensor":
            whole, dim, start, end, step = (*half.args, *(0, None, None, 1)[len(half.args) - 1 :])
            width = _width(whole)
            begins = start in (0, None) if first else end is None or _reaches(end, width)
            begins = begins and step == 1
        case "<built-in function getitem>":
            split, at = half.args
            if _target(split) not in ("aten.split.Tensor", "aten.split_with_sizes.default"):
                return None
            whole, _, dim = (*split.args, *(0,)[len(split.args) - 2 :])
            width, begins = _width(whole), at == (0 if first else 1)
        case _:
            return None
    is_half = dim in (1, -1) and width and 2 * _width(half) == width
    return whole if is_half and begins else None


def _reaches(end: Any, width: int) -> bool:
    return isinstance(end, int) and end >= width


def _width(matrix: Any) -> int:
    """How many columns it has; 0 where that is not known, or it is no matrix."""
    shape = matrix.meta["val"].shape
    return shape[1] if len(shape) == 2 and isinstance(shape[1], int) else 0


def _target(node: Any) -> str:
    return str(getattr(node, "target", ""))


def _may_have(config: Any) -> bool:
    """Whether the model has an MLP with silu: its configuration says so, or names no activation, as
    ChatGLM's and LFM2's."""
    named = [word for word in ("silu", "swiglu", "_act", "activation") if mentions(word)(config)]
    is_silu = not named or named[0] in ("silu", "swiglu")
    return may_have(config) and is_silu and bool(DENSE_INTERMEDIATE.ask(config))


BINDING = Binding(
    places=(GraphPlace(("aten.mul.Tensor",), _find, _native),),
    sizes=(HIDDEN, DENSE_INTERMEDIATE),
    not_reached=(
        *LINEAR.not_reached,
        "mixtures of experts, beside which some layers have an MLP",
        "activations that are an operator in the graph: vLLM's with `+silu_and_mul`, or ours where "
        "`silu_and_mul` is planned",
        "MLPs with a bias, or whose gate and up are two layers",
    ),
    when=_may_have,
    products=True,
)
