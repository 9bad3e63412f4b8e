"""Implementations by the vendor `acme`, and a correct `silu_and_mul` for tests to change."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

from torch import Tensor
from torch.nn.functional import silu

from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.types import BackendImplKind, OpImpl

__all__ = ["acme", "silu_and_mul"]


def acme(op: str, fn: Any, vendor: str = "acme", **fields: Any) -> OpImpl:
    """An implementation of the op. A function with `*args` gets the contract's parameters."""
    functions: list[Callable[..., Any]] = [fn, *filter(None, [fields.get("supports")])]
    for each in functions:
        if Parameter.VAR_POSITIONAL in (p.kind for p in signature(each).parameters.values()):
            vars(each)["__signature__"] = known_contracts().contracts[op].signature
    return OpImpl(op, f"vendor.{vendor}", BackendImplKind.VENDOR, fn, vendor, **fields)


def silu_and_mul(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return silu(x[..., :half]) * x[..., half:]
