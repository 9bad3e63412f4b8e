"""Implementations, one module per op, and their shared code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_fl import Availability, BackendImplKind, OpImpl

__all__ = ["available", "implementation"]

VENDOR = ("vendor.acme", BackendImplKind.VENDOR)
"""Id and kind of every implementation in this package."""

DEVICE = "cpu"
"""torch's name of the device on which the kernels run."""


def available() -> Availability:
    """Return True, or why no implementation can run: a missing library or device.

    Called once per process. Must not initialise the device or call a kernel, since the process may
    fork later.
    """
    device = getattr(torch, DEVICE, None)  # torch.cuda, torch.npu, torch.cpu
    if device is None or device.device_count() == 0:  # counting does not initialise a device
        return f"torch finds no device {DEVICE!r}"
    return True


def implementation(fn: Callable[..., Any], *takes: str) -> OpImpl:
    """Return `fn` as the implementation `vendor.acme` of the op with the function's name.

    Calls that break the contract, and calls with tensors on another device, are not supported.

    Args:
        fn: the function; its first argument is a tensor.
        takes: further conditions for supported calls, such as `d % 16 == 0`: expressions of the
            contract's parameters and of the sizes in its shapes. They must not depend on values of
            tensors or on the number of tokens.
    """
    device = f"{fn.__code__.co_varnames[0]}.device.type == {DEVICE!r}"
    return OpImpl(fn.__name__, *VENDOR, fn, "acme", available=available, takes=(device, *takes))
