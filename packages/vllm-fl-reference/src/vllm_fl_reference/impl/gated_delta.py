"""Gated delta rules and their gates. vLLM has kernels alone; these follow the formula in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import implementations

__all__ = ["OPS", "gdn_gating"]


def gdn_gating(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(-exp(A_log) * softplus(a + dt_bias), sigmoid(b)), computed in fp32.

    Args:
        a, b: (tokens, heads), floating.
        A_log, dt_bias: (heads,), floating.

    Returns:
        (g, beta), both (tokens, heads): g in float32, beta in b's dtype.

    Raises:
        TypeError, ValueError: PyTorch would have broadcast or widened in silence.
    """
    _refuse_silent_mistakes(a, b, A_log, dt_bias)
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return g, b.float().sigmoid().to(b.dtype).contiguous()


def _refuse_silent_mistakes(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> None:
    if not all(x.is_floating_point() for x in (a, b, A_log, dt_bias)):
        raise TypeError("a, b, A_log and dt_bias must be floating")
    if a.ndim != 2 or a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError("a and b must be (tokens, heads), of one dtype")
    if A_log.shape != a.shape[1:] or dt_bias.shape != a.shape[1:]:
        raise ValueError("A_log and dt_bias must be (heads,)")


OPS = implementations(gdn_gating)
