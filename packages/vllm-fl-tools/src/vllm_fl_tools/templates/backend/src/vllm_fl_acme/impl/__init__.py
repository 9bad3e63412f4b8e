"""The operators and their shared code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_fl import Availability, BackendImplKind, OpImpl

__all__ = ["available", "implementation"]

VENDOR = ("vendor.acme", BackendImplKind.VENDOR)
"""Identity and kind of every implementation here."""

DEVICE = "cpu"
"""torch's name of the device that the kernels run on."""


def available() -> Availability:
    """True, or why nothing here can run: no library, no device. Asked once per process.

    It neither starts the device nor calls a kernel: the process may fork later.
    """
    device = getattr(torch, DEVICE, None)  # torch.cuda, torch.npu, torch.cpu
    if device is None or device.device_count() == 0:  # counting starts no device
        return f"torch finds no device {DEVICE!r}"
    return True


def implementation(fn: Callable[..., Any], *takes: str) -> OpImpl:
    """The function, named after its op, as `vendor.acme`.

    Calls that break the contract are refused, and tensors on another device.

    Args:
        fn: its first argument is a tensor.
        takes: what else must hold of a call, such as `d % 16 == 0`: expressions of the contract's
            parameters and of the sizes in its shapes. They look at neither a tensor's values nor
            the number of tokens.
    """
    device = f"{fn.__code__.co_varnames[0]}.device.type == {DEVICE!r}"
    return OpImpl(fn.__name__, *VENDOR, fn, "acme", available=available, takes=(device, *takes))
