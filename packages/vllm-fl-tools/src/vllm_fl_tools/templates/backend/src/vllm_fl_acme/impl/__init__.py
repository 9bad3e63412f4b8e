"""The operators, and what they share: where they run, and what they take."""

from __future__ import annotations

import torch

from vllm_fl import Availability, BackendImplKind

__all__ = ["VENDOR", "available", "elsewhere", "unsuitable"]

VENDOR = ("vendor.acme", BackendImplKind.VENDOR)
"""Identity and kind of every implementation here."""

DEVICE = "cpu"
"""torch's name of the device that the kernels run on."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def available() -> Availability:
    """True, or why nothing here can run: no library, no device. Asked once per process.

    It neither starts the device nor calls a kernel: the process may fork later.
    """
    device = getattr(torch, DEVICE, None)  # torch.cuda, torch.npu, torch.cpu
    if device is None or device.device_count() == 0:  # counting starts no device
        return f"torch finds no device {DEVICE!r}"
    return True


def unsuitable(name: str, x: torch.Tensor) -> str | None:
    """Why no kernel takes the tensor `x`; None if one may."""
    if x.device.type != DEVICE:
        return f"{name} is on {x.device}, not on {DEVICE}"
    if x.dtype not in DTYPES:
        return f"no kernel for {name} of {x.dtype}"
    if x.ndim == 0:
        return f"no kernel for {name} without a dimension"
    return None


def elsewhere(x: torch.Tensor, **others: torch.Tensor | None) -> str | None:
    """Which of the other tensors is not on x's device; None if all are.

    A kernel would read memory that is not its own, which may end the process.
    """
    for name, tensor in others.items():
        if tensor is not None and tensor.device != x.device:
            return f"{name} is on {tensor.device}, not on {x.device}"
    return None
