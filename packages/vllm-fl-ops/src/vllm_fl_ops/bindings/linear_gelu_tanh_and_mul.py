"""Where vLLM runs `linear_gelu_tanh_and_mul`: an MLP's first product and its activation, in the
graphs that it compiles."""

from __future__ import annotations

from ..contracts.gated_products import gelu_tanh
from ._gated_products import GATE, gated_product
from ._models import mentions

__all__ = ["BINDING"]

CUBE = ("aten.mul.Tensor", ("aten.mul.Tensor", GATE, GATE), GATE)
INNER = ("aten.add.Tensor", GATE, ("aten.mul.Tensor", CUBE, 0.044715))
TANH = ("aten.tanh.default", ("aten.mul.Tensor", INNER, 0.7978845608028654))
FORMULAS = (
    ("aten.mul.Tensor", ("aten.mul.Tensor", GATE, 0.5), ("aten.add.Tensor", TANH, 1)),
    ("aten.gelu.default", GATE, {"approximate": "tanh"}),
)

BINDING = gated_product("gelu_and_mul", gelu_tanh, FORMULAS, mentions("gelu_pytorch_tanh"))
