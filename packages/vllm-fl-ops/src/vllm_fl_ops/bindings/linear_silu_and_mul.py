"""Where vLLM runs `linear_silu_and_mul`: an MLP's first product and its activation, in the graphs
that it compiles."""

from __future__ import annotations

from typing import Any

from ..contracts.gated_products import silu
from ._gated_products import GATE, gated_product
from ._models import mentions

__all__ = ["BINDING"]

FORMULAS = (
    (
        "aten.div.Tensor",
        GATE,
        ("aten.add.Tensor", ("aten.exp.default", ("aten.neg.default", GATE)), 1),
    ),
    ("aten.silu.default", GATE),
)


def _has_silu(config: Any) -> bool:
    """Whether the configuration says so, or names no activation, as ChatGLM's and LFM2's."""
    named = [word for word in ("silu", "swiglu", "_act", "activation") if mentions(word)(config)]
    return not named or named[0] in ("silu", "swiglu")


BINDING = gated_product("silu_and_mul", silu, FORMULAS, _has_silu)
