"""Gated delta rules and their gates, on vLLM's C++ CPU kernels."""

from __future__ import annotations

import torch

from vllm_fl import Availability, OpImpl

from . import VENDOR, kernel, provides, unsuitable

__all__ = [
    "OPS",
    "chunk_gated_delta_rule",
    "gdn_gating",
    "supports_chunk_gated_delta_rule",
    "supports_gdn_gating",
]

HALF = (torch.float16, torch.bfloat16)

CHUNKED_SIZES = (64, 128)
"""Features of a head for which there is a chunked kernel."""

ANY_EPSILON = 1e-6
"""Given where nothing is normed, and nothing reads it."""


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


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    epsilon: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunks of 64 tokens as products of matrices, rounded to bfloat16 before each.

    The kernel keeps states of keys by values, in a cache that it overwrites: here a copy.

    Args:
        q, k: (tokens, heads, size), bfloat16, of any layout; size 64 or 128.
        v: (tokens, value_heads, size), likewise.
        g, beta: (tokens, value_heads), g in float32; beta is rounded to bfloat16.
        initial_state: (sequences, value_heads, size, size), bfloat16 or float32.
        cu_seqlens: (sequences + 1,), int32 or int64.
        epsilon: None, or what the squared length of each q and k has added.

    Returns:
        (out, final_state), of the shapes and dtypes of v and initial_state.
    """
    states = initial_state.transpose(2, 3).to(
        torch.float32, copy=True, memory_format=torch.contiguous_format
    )
    out, _ = kernel("chunk_gated_delta_rule_cpu")(
        *(x.contiguous()[None] for x in (q, k, v, g, beta.to(q.dtype))),
        states,
        True,
        cu_seqlens.int(),
        False,
        epsilon is not None,
        torch.arange(len(states), dtype=torch.int32),
        epsilon or ANY_EPSILON,
    )
    return out[0], states.transpose(2, 3).to(initial_state.dtype).contiguous()


def supports_chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    epsilon: float | None = None,
) -> Availability:
    """True, or why the kernel would fail."""
    reason = unsuitable("q", q)
    if reason:
        return reason
    if q.dtype != torch.bfloat16:
        return f"q is {q.dtype}: no chunked kernel but for bfloat16"
    sizes = q.shape[-1], v.shape[-1]
    if sizes[0] != sizes[1] or sizes[0] not in CHUNKED_SIZES:
        return f"keys and values of {sizes} features: no chunked kernel but for 64 or 128 of both"
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
    OpImpl(
        "chunk_gated_delta_rule",
        *VENDOR,
        chunk_gated_delta_rule,
        "cpu",
        available=provides("chunk_gated_delta_rule_cpu"),
        supports=supports_chunk_gated_delta_rule,
    ),
)
