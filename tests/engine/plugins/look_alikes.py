"""Vendors whose names differ in what an ASCII spelling would fold.

Each notes its calls in served forwards, one line each, in the file LOOK_ALIKES.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.forward_context import is_forward_context_available

from vllm_fl import BackendImplKind, OpImpl, hookimpl

VENDORS = ("a-b", "a_b", "A_B", "é", "华为")


def _note(line: str) -> None:
    if is_forward_context_available():
        with Path(os.environ["LOOK_ALIKES"]).open("a") as file:
            file.write(f"{line}\n")


def _silu(vendor: str) -> Callable[..., Any]:
    def silu_and_mul(x: Tensor) -> Tensor:
        _note(f"silu_and_mul vendor.{vendor}")
        half = x.shape[-1] // 2
        return F.silu(x[..., :half]) * x[..., half:]

    return silu_and_mul


def _norm(vendor: str) -> Callable[..., Any]:
    def rms_norm(
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> Any:
        _note(f"rms_norm vendor.{vendor}")
        y = x.float() if residual is None else x.float() + residual.float()
        normed = y * torch.rsqrt(y[..., :variance_size].pow(2).mean(-1, keepdim=True) + epsilon)
        normed = normed if weight is None else normed.to(weight.dtype) * weight
        normed = normed.to(x.dtype)
        return normed if residual is None else (normed, y.to(x.dtype))

    return rms_norm


@hookimpl
def register_ops() -> list[OpImpl]:
    return [
        OpImpl(op, f"vendor.{vendor}", BackendImplKind.VENDOR, make(vendor), vendor)
        for op, make in (("silu_and_mul", _silu), ("rms_norm", _norm))
        for vendor in VENDORS
    ]
