"""Bindings of an MLP's first product with its activation, in the graphs that vLLM compiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.binding import Binding, GraphTarget

from ..contracts.gated_products import gelu_tanh, silu
from ..contracts.rules import HIDDEN
from ._models import mentions
from .linear import BINDING as LINEAR
from .linear import DENSE_INTERMEDIATE, OPERATORS, may_have, product_of

if TYPE_CHECKING:
    from torch import Tensor

GATE = "gate"
"""The gate in a formula. A formula is a tuple: an operator, its arguments (numbers, the gate,
formulas), and last a dictionary of keyword arguments, if there are any.
"""

CONVERTED = "prims.convert_element_type.default"


def _gated_product(
    part: str,
    activation: Callable[[Tensor], Tensor],
    formulas: tuple[Any, ...],
    has_it: Callable[[Any], bool],
) -> Binding:
    """Return the binding of a product with an activation.

    Args:
        part: the activation's op. It keeps vLLM's implementation if the op of the product is
            planned.
        activation: the activation in PyTorch.
        formulas: the activation in graphs: decomposed by Inductor, and as one operator. If
            decomposed, half precision is computed in float32 and the result converted.
        has_it: VllmConfig -> whether the model has an MLP with this activation.
    """

    def native(x: Tensor, weight: Tensor) -> Tensor:
        from torch.nn.functional import linear

        gate, up = linear(x, weight).chunk(2, dim=-1)
        return activation(gate) * up

    def when(config: Any) -> bool:
        if not (may_have(config) and has_it(config) and DENSE_INTERMEDIATE.ask(config)):
            return False
        return not config.model_config.using_transformers_backend()

    found = partial(_find, formulas)
    return Binding(
        targets=(GraphTarget(("aten.mul.Tensor",), found, native, parts=(part,)),),
        sizes=(HIDDEN, DENSE_INTERMEDIATE),
        not_reached=(
            *LINEAR.not_reached,
            "mixtures of experts, except their MLP layers",
            f"activations that are an operator in the graph: vLLM's with `+{part}`, or ours if "
            f"`{part}` is planned",
            "the Transformers backend: its tensors have a third dimension",
            "MLPs with a bias, or with separate gate and up layers",
        ),
        when=when,
    )


def _find(formulas: tuple[Any, ...], node: Any) -> tuple[Any, ...] | None:
    """Return x and weight if the node is activation(gate) * up, else None.

    gate and up must be the halves of a product that nothing else reads.
    """
    for activated, up in (node.args, node.args[::-1]):
        gate = next(filter(None, (_gate_of(activated, each) for each in formulas)), None)
        product = _whole_of(gate, first=True)
        if product is None or product is not _whole_of(up, first=False):
            continue
        dtypes = {of.meta["val"].dtype for of in (node, activated, product)}
        if len(dtypes) == 1 and _target(product) in OPERATORS and _is_read_by(node, product):
            x, weight, bias = product_of(product) or (None, None, None)
            return None if x is None or bias is not None else (x, weight)
    return None


def _is_read_by(node: Any, product: Any) -> bool:
    """Return whether `product`, and the nodes from it to `node`, have no other readers."""
    between = [node]
    for of in between:
        between += [each for each in of.all_input_nodes if each not in (product, *between)]
    return all(of.users.keys() <= {*between} for of in (product, *between[1:]))


def _gate_of(activated: Any, formula: Any) -> Any:
    """The gate if a node is its activation by this formula, else None."""
    result = activated.args[0] if _target(activated) == CONVERTED else activated
    gates: dict[Any, None] = {}
    if not _is(result, formula, gates) or len(gates) != 1:
        return None
    (gate,) = gates
    is_widened = _target(gate) == CONVERTED and str(gate.args[1]) == "torch.float32"
    return gate.args[0] if is_widened else gate


def _is(part: Any, formula: Any, gates: dict[Any, None]) -> bool:
    """Return whether `part` computes a formula, or is the same number. Adds the nodes at the gate's
    place to `gates`.
    """
    if formula is GATE:
        gates[part] = None
        return True
    if not isinstance(formula, tuple):
        return bool(part == formula)
    name, *factors = formula
    named = factors.pop() if isinstance(factors[-1], dict) else {}
    if _target(part) != name or part.kwargs != named or len(part.args) != len(factors):
        return False
    return all(_is(*each, gates) for each in zip(part.args, factors, strict=True))


def _whole_of(half: Any, first: bool) -> Any:
    """The matrix that has this node as the first or second half of its columns, or None."""
    match _target(half):
        case "aten.slice.Tensor":
            whole, begins, ends = _sliced(*half.args)
        case "<built-in function getitem>":
            whole, begins, ends = _split(*half.args)
        case _:
            return None
    if not (begins if first else ends):
        return None
    # A slice of the rows would be as wide as the whole.
    return whole if 0 < 2 * _width(half) == _width(whole) else None


def _sliced(
    whole: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> tuple[Any, bool, bool]:
    """Return (the sliced node, whether the slice has its first column, whether it has its last
    column)."""
    to_end = end is None or (isinstance(end, int) and end >= _width(whole))
    return whole, step == 1 and start in (0, None), step == 1 and to_end


def _split(parts: Any, at: int) -> tuple[Any, bool, bool]:
    """Return the same as `_sliced`, for a part of a split."""
    is_split = _target(parts) in ("aten.split.Tensor", "aten.split_with_sizes.default")
    return parts.args[0] if is_split else None, is_split and at == 0, is_split and at == 1


def _width(matrix: Any) -> int:
    """The number of columns of a matrix; 0 if unknown, or for other tensors."""
    match [*getattr(matrix.meta["val"], "shape", ())]:
        case [_, int(columns)]:
            return columns
    return 0


def _target(node: Any) -> str:
    return str(getattr(node, "target", ""))


def _has_silu(config: Any) -> bool:
    """Return whether the configuration names silu, or (for ChatGLM and LFM2) no activation."""
    named = [word for word in ("silu", "swiglu", "_act", "activation") if mentions(word)(config)]
    return not named or named[0] in ("silu", "swiglu")


SILU = (
    (
        "aten.div.Tensor",
        GATE,
        ("aten.add.Tensor", ("aten.exp.default", ("aten.neg.default", GATE)), 1),
    ),
    ("aten.silu.default", GATE),
)

_CUBE = ("aten.mul.Tensor", ("aten.mul.Tensor", GATE, GATE), GATE)
_INNER = ("aten.add.Tensor", GATE, ("aten.mul.Tensor", _CUBE, 0.044715))
_TANH = ("aten.tanh.default", ("aten.mul.Tensor", _INNER, 0.7978845608028654))
GELU = (
    ("aten.mul.Tensor", ("aten.mul.Tensor", GATE, 0.5), ("aten.add.Tensor", _TANH, 1)),
    ("aten.gelu.default", GATE, {"approximate": "tanh"}),
)

BINDING: Mapping[str, Binding] = {
    "linear_silu_and_mul": _gated_product("silu_and_mul", silu, SILU, _has_silu),
    "linear_gelu_tanh_and_mul": _gated_product(
        "gelu_and_mul", gelu_tanh, GELU, mentions("gelu_pytorch_tanh")
    ),
}
