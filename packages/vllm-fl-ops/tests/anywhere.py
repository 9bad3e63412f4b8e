"""Backends' implementations without their devices: the calls they support, with CPU tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from vllm_fl import OpImpl
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.signatures import fitted

__all__ = ["on_cpu", "registered"]


def registered(impls: Iterable[OpImpl]) -> dict[str, Any]:
    """Implementations by op, as registered: with a compiled `supports`."""
    return {impl.op_name: fitted(impl, known_contracts().contracts[impl.op_name]) for impl in impls}


def on_cpu(impls: Iterable[OpImpl]) -> dict[str, Any]:
    """`registered`, for tensors on the CPU. The first rule of an implementation is its device."""
    here = []
    for impl in impls:
        device, *others = impl.takes or ()
        rule = f"{str(device).partition('.')[0]}.device.type == 'cpu'"
        here.append(dataclasses.replace(impl, takes=(rule, *others)))
    return registered(here)
