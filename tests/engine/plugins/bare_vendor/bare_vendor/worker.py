"""The worker: fl-bare-cpu's, which registers a layer that counts its calls."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from fl_bare_cpu.worker import BareCpuWorker
from vllm.model_executor.layers.activation import SiluAndMul

CALLS: Counter[str] = Counter()


class BareVendorSiluAndMul(SiluAndMul):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        CALLS["SiluAndMul"] += 1
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


class BareVendorWorker(BareCpuWorker):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        SiluAndMul.register_oot(BareVendorSiluAndMul)
        super().__init__(*args, **kwargs)

    def calls(self) -> dict[str, int]:
        return dict(CALLS)
