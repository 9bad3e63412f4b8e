"""The operators, and what they share: the demands of torch_npu's kernels on tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm_fl import Availability, BackendImplKind, OpImpl

from ..npu import available

__all__ = ["DIMENSIONS", "VENDOR", "implementation"]

VENDOR = ("vendor.ascend", BackendImplKind.VENDOR)
"""Identity and kind of every implementation here, attention included."""

DIMENSIONS = "1 <= x.ndim <= 8"
"""Of any tensor on an NPU (CANN's aclTensor)."""


def implementation(fn: Callable[..., Any], *takes: str | Callable[..., Availability]) -> OpImpl:
    """The function, named after its op, as `vendor.ascend`.

    Args:
        fn: its first argument is a tensor, which must be on an NPU.
        takes: rules for the calls it supports (`OpImpl.takes`).
    """
    device = f"{fn.__code__.co_varnames[0]}.device.type == 'npu'"
    rules: Sequence[Any] = (device, *takes)
    return OpImpl(fn.__name__, *VENDOR, fn, "ascend", available=available, takes=rules)
