"""The operators, and what they share: the demands of torch_npu's kernels on tensors."""

from __future__ import annotations

import torch

__all__ = ["unsuitable"]

DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})

MAX_DIMENSIONS = 8
"""Of any tensor on an NPU (CANN's aclTensor)."""


def unsuitable(name: str, x: torch.Tensor) -> str | None:
    """Why no kernel takes the tensor `x`, by its dtype or dimensions; None if one may.

    The device is left to torch: an operator that has no kernel for a tensor's device refuses it.
    """
    if x.dtype not in DTYPES:
        return f"no kernel for {name} of {x.dtype}"
    if not 1 <= x.ndim <= MAX_DIMENSIONS:
        return f"no kernel for {name} of {x.ndim} dimensions"
    return None
