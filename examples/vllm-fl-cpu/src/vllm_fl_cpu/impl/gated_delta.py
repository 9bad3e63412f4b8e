"""Gated delta rules and their gates, on vLLM's C++ CPU kernels."""

from __future__ import annotations

import torch

from vllm_fl import Availability, OpImpl

from . import VENDOR, kernel, provides, unsuitable

__all__ = ["OPS", "gdn_gating", "supports_gdn_gating"]

HALF = (torch.float16, torch.bfloat16)


def gdn_gating(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(-exp(A_log) * softplus(a + dt_bias), sigmoid(b)).

    Args:
        a, b: (tokens, heads), float16 or bfloat16, of any layout.
        A_log: (heads,), of a's dtype or float32.
        dt_bias: (heads,), of a's dtype.

    Returns:
        (g, beta), both (tokens, heads): g in float32, beta in b's dtype.
    """
    g, beta = kernel("fused_gdn_gating_cpu")(
        A_log.contiguous(), a.contiguous(), b.contiguous(), dt_bias.contiguous()
    )
    return g[0], beta[0]


def supports_gdn_gating(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> Availability:
    """True, or why the kernel would fail."""
    reason = unsuitable("a", a)
    if reason:
        return reason
    if a.dtype not in HALF or dt_bias.dtype != a.dtype:
        return f"a is {a.dtype} and dt_bias {dt_bias.dtype}: no kernel but for both in one half"
    return True


OPS = (
    OpImpl(
        "gdn_gating",
        *VENDOR,
        gdn_gating,
        "cpu",
        available=provides("fused_gdn_gating_cpu"),
        supports=supports_gdn_gating,
    ),
)
