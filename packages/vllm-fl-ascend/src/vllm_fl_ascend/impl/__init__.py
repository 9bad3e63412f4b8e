"""Ops on torch_npu's kernels, one module per family.

Arguments and results are those in the op's contract (`vllm_fl_ops.contracts`); docstrings describe
the operators and unsupported calls. RuntimeError means that a kernel in CANN failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm_fl import Availability, BackendImplKind, OpImpl

from ..npu import available

__all__ = ["DIMENSIONS", "VENDOR", "implementation"]

VENDOR = ("vendor.ascend", BackendImplKind.VENDOR)
"""Id and kind of every implementation in this package, attention included."""

DIMENSIONS = "1 <= x.ndim <= 8"
"""Limits of tensors on an NPU (CANN's aclTensor)."""


def implementation(fn: Callable[..., Any], *takes: str | Callable[..., Availability]) -> OpImpl:
    """Return `fn` as the implementation `vendor.ascend` of the op with the function's name.

    Args:
        fn: its first argument is a tensor, which must be on an NPU.
        takes: conditions for supported calls (`OpImpl.takes`).
    """
    device = f"{fn.__code__.co_varnames[0]}.device.type == 'npu'"
    rules: Sequence[Any] = (device, *takes)
    return OpImpl(fn.__name__, *VENDOR, fn, "ascend", available=available, takes=rules)
