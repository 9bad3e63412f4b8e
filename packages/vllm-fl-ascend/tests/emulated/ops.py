"""What the operators behind `silu_and_mul`, `gelu_and_mul`, the norms and rotary compute.

Written from torch_npu's own documentation of each (torch_npu/_op_plugin_docs.py of the wheel), in
fp32 with one rounding at the end, as the kernels do. What that documentation rules out is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .operators import EmulationError, numerics

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def demand(condition: bool, name: str, what: str) -> None:
    if not condition:
        raise EmulationError(f"npu::{name} takes {what}")


@numerics("npu_swiglu")
def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    demand(input.dtype in FLOATS, "npu_swiglu", "float32, float16 or bfloat16")
    demand(1 <= input.ndim <= 8, "npu_swiglu", "1 to 8 dimensions")
    demand(input.shape[dim] % 2 == 0, "npu_swiglu", "an even size")
    left, right = input.float().chunk(2, dim)
    return (left * torch.sigmoid(left) * right).to(input.dtype)
