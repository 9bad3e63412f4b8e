"""The operators, and what they share: the demands of torch_npu's kernels on tensors."""

from __future__ import annotations

import torch

from vllm_fl import BackendImplKind

__all__ = ["VENDOR", "elsewhere", "mixed", "unsuitable"]

VENDOR = ("vendor.ascend", BackendImplKind.VENDOR)
"""Identity and kind of every implementation here, attention included."""

DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})

DEVICE = "npu"
"""What torch calls the device whose tensors the kernels take."""

MAX_DIMENSIONS = 8
"""Of any tensor on an NPU (CANN's aclTensor)."""


def unsuitable(name: str, x: torch.Tensor) -> str | None:
    """Why no kernel takes the tensor `x`, by its device, dtype or dimensions; None if one may."""
    if x.device.type != DEVICE:
        return f"{name} is on {x.device}, not on an NPU"
    return _no_kernel_for(name, x)


def mixed(name: str, x: torch.Tensor | None, other: str, y: torch.Tensor) -> str | None:
    """Why no kernel takes `x` beside `y`: another dtype or device. None if one may."""
    if x is None:
        return None
    if x.dtype != y.dtype:
        return f"{name} is {x.dtype} and {other} {y.dtype}"
    return elsewhere(name, x, y)


def elsewhere(name: str, x: torch.Tensor, y: torch.Tensor) -> str | None:
    """Why no kernel takes `x` beside `y`: it is on another device. None if one may."""
    return None if x.device == y.device else f"{name} is on {x.device}, not on {y.device}"


def _no_kernel_for(name: str, x: torch.Tensor) -> str | None:
    if x.dtype not in DTYPES:
        return f"no kernel for {name} of {x.dtype}"
    if not 1 <= x.ndim <= MAX_DIMENSIONS:
        return f"no kernel for {name} of {x.ndim} dimensions"
    return None
