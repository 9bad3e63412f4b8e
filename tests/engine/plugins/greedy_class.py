"""A class that puts itself into vLLM's table of replacements when it is imported."""

from __future__ import annotations

from own_classes import OwnRow
from vllm.model_executor.custom_op import PluggableLayer


@PluggableLayer.register_oot(name="RowParallelLinear")
class GreedyRow(OwnRow):
    pass
