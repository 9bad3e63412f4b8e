"""Gated delta rules and their gates by the formula, in fp32. vLLM has only kernels for them."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from . import implementations

__all__ = ["OPS", "chunk_gated_delta_rule", "gdn_gating", "recurrent_gated_delta_rule"]


def gdn_gating(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(-exp(A_log) * softplus(a + dt_bias), sigmoid(b)), computed in fp32."""
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return g, b.float().sigmoid().to(b.dtype)


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
    """Compute token by token in fp32; results are rounded once.

    Raises:
        ValueError: cu_seqlens does not rise from 0 to tokens; PyTorch would not detect that.
    """
    q, k, v32 = _heads(q, k, v, epsilon)
    at = cu_seqlens.tolist()
    if [0, *sorted(at[1:-1]), len(q)] != at:
        raise ValueError(f"cu_seqlens must rise from 0 to {len(q)} in {len(initial_state)} steps")
    states = initial_state.float().clone(memory_format=torch.contiguous_format)
    kept, strength = g.exp()[..., None, None], beta.float()[..., None]
    out = torch.empty_like(v, dtype=torch.float32, memory_format=torch.contiguous_format)
    for state, (begin, end) in zip(states, pairwise(at), strict=True):
        for t in range(begin, end):
            out[t] = _step(state, q[t], k[t], v32[t], kept[t], strength[t])
    return out.to(v.dtype), states.to(initial_state.dtype)


def recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    state_indices: torch.Tensor,
    epsilon: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute all tokens at once in fp32; results are rounded once.

    Raises:
        ValueError: a slot is negative; PyTorch would silently count from the end.
        IndexError: state does not have a slot.
    """
    dtype = v.dtype
    q, k, v = _heads(q, k, v, epsilon)
    if bool((state_indices < 0).any()):
        raise ValueError("state_indices must not be negative")
    real = state_indices != 0
    rows = state_indices.long()
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    states = state[rows].float()
    out = _step(states, q, k, v, g.exp()[..., None, None], b.float().sigmoid()[..., None])
    state[rows[real]] = states[real].to(state.dtype)
    return out.masked_fill(~real[:, None, None], 0.0).to(dtype), state


def _heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, epsilon: float | None
) -> tuple[torch.Tensor, ...]:
    """Return q, k, v in fp32; q and k normalised and repeated for each head of v, q scaled."""
    q, k = q.float(), k.float()
    if epsilon is not None:
        q, k = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + epsilon) for x in (q, k))
    share = v.shape[1] // q.shape[1]
    q = (q * q.shape[-1] ** -0.5).repeat_interleave(share, dim=1)
    return q, k.repeat_interleave(share, dim=1), v.float()


def _step(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kept: torch.Tensor,
    strength: torch.Tensor,
) -> torch.Tensor:
    """Update `state` (..., value_size, key_size) in place with one token; return the output."""
    state *= kept
    learnt = strength * (v - (state * k.unsqueeze(-2)).sum(-1))
    state += learnt.unsqueeze(-1) * k.unsqueeze(-2)
    return (state * q.unsqueeze(-2)).sum(-1)


OPS = (
    *implementations(gdn_gating, chunk_gated_delta_rule, traceable=False),
    *implementations(recurrent_gated_delta_rule, consumes=("state",), traceable=False),
)
