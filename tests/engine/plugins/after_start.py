"""Kernels that become incorrect after startup: one once the KV cache exists, one once weights are
updated. Both fail only with the loaded model, so generated inputs do not reveal it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.forward_context import is_forward_context_available

from vllm_fl import BackendImplKind, OpImpl, hookimpl

WORKSPACE = 900 * 2**20
"""Bytes; more than a startup allocates between running the loaded model and the KV cache."""

_taken: list[int] = []
_kept: dict[int, Tensor] = {}


def memory() -> int:
    """Bytes of virtual memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


def silu_and_mul(x: Tensor) -> Tensor:
    """Incorrect once memory use has grown by WORKSPACE since the first forward pass."""
    half = x.shape[-1] // 2
    result = F.silu(x[..., :half]) * x[..., half:]
    if is_forward_context_available():
        _taken[:] = _taken or [memory()]
        if memory() - _taken[0] > WORKSPACE:
            result = result * 1.5
    return result


def rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Caches a copy of each weight by address, so an update in place has no effect."""
    if weight is not None and is_forward_context_available():
        weight = _kept.setdefault(weight.data_ptr(), weight.clone())
    wide = x.float()
    if residual is not None:
        wide = wide + residual.float()
        residual = wide.to(x.dtype)
    measured = wide if variance_size is None else wide[..., :variance_size]
    normed = wide * torch.rsqrt(measured.pow(2).mean(-1, keepdim=True) + epsilon)
    normed = (
        normed.to(x.dtype) if weight is None else (normed.to(weight.dtype) * weight).to(x.dtype)
    )
    return normed if residual is None else (normed, residual)


@hookimpl
def register_ops() -> list[OpImpl]:
    kind = BackendImplKind.VENDOR
    return [
        OpImpl(fn.__name__, "vendor.afterstart", kind, fn, "afterstart")
        for fn in (silu_and_mul, rms_norm)
    ]
