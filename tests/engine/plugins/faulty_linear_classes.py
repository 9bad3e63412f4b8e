"""The classes of `faulty_linear`: over vLLM's for int8, over the CPU example's for WNA16. PLANTED
has the form, the number of the fault, the seed of its location, and the rank. The experts have a
fault of their own."""

from __future__ import annotations

import json
import os
import random
from typing import Any

from quantised_layers import FAULTS, faulty
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.kernels.linear import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsInt8

from vllm_fl_cpu.impl.linear import WNA16Linear

form, number, seed, rank = json.loads(os.environ["PLANTED"])


def in_fused_layers(layer: Any, draw: random.Random) -> None:
    """Plant the fault in layers with several parts only, which no layer with made weights has."""
    if hasattr(layer, "output_sizes") and get_tensor_model_parallel_rank() == rank:
        FAULTS[form][number](layer, draw)


Int8 = faulty(CPUInt8ScaledMMLinearKernel, in_fused_layers, random.Random(seed))
WNA16 = faulty(WNA16Linear, in_fused_layers, random.Random(seed))


class Experts(CPUExpertsInt8):  # type: ignore[misc]
    def apply(self, output: Any, *args: Any, **named: Any) -> None:
        super().apply(output, *args, **named)
        output[-1] *= 1.5
