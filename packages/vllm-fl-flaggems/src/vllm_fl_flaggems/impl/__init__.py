"""Ops on FlagGems's Triton kernels, one module per family.

Arguments and results are those in the op's contract (`vllm_fl_ops.contracts`); docstrings describe
rounding and unsupported calls. Calls raise NotImplementedError if FlagGems cannot be imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from vllm_fl import Availability, BackendImplKind, OpImpl

from ..kernels import CUDA
from ..loading import available, flag_gems, problem

FLAGOS = ("default.flagos", BackendImplKind.DEFAULT)
"""Id and kind of every implementation in this package, attention included."""


def implementation(
    fn: Callable[..., Any],
    *takes: str | Callable[..., Availability],
    own: bool = False,
    **more: Any,
) -> OpImpl:
    """Return `fn` as the implementation `default.flagos` of the op with the function's name.

    Args:
        fn: its first argument is a tensor on the kernels' device.
        takes: conditions for supported calls (`OpImpl.takes`).
        own: True if the kernels are in this package. It skips the import of FlagGems,
            which takes seconds.
        more: other fields of `OpImpl`.
    """
    name = fn.__code__.co_varnames[0]
    device: Any = f"{name}.device.type in {CUDA}" if own else device_condition(name)
    return OpImpl(fn.__name__, *FLAGOS, fn, available=available, takes=(device, *takes), **more)


def device_condition(name: str) -> Callable[..., Availability]:
    """Return the condition that FlagGems can be imported and tensor `name` is on its device."""

    def rule(**given: Any) -> Availability:
        if reason := problem():
            return reason
        here, device = given[name].device, flag_gems().device
        return here.type == device or f"{name} is on {here}, but FlagGems runs on {device}"

    parameter = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
    rule.__signature__ = inspect.Signature([parameter])  # type: ignore[attr-defined]
    return rule
