"""Third-party vLLM general plugin that replaces a layer which vllm-fl also replaces."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any


def register() -> None:
    names = [e.name for e in entry_points(group="vllm.general_plugins")]
    print("foreign: in the order", [n for n in names if n in ("fl", "foreign")], flush=True)
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.layers.activation import SiluAndMul

    class ForeignSilu(SiluAndMul):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            print("foreign: ForeignSilu serves", flush=True)

    ForeignSilu.__qualname__ = "ForeignSilu"
    CustomOp.register_oot(name="SiluAndMul")(ForeignSilu)  # vLLM rejects a second registration
