"""Rotary embedding, in place by default."""

from __future__ import annotations

import torch


def _rotated(x: torch.Tensor, cos, sin, interleaved: bool) -> torch.Tensor:
    half = cos.shape[-1]
    head, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    one, two = (head[..., ::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    parts = (one * cos - two * sin, two * cos + one * sin)
    turned = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def rotary_embedding_musa(
    obj, query, key, cos, sin, position_ids, rotary_interleaved=False, inplace=True
):
    cos = cos[position_ids].unsqueeze(-2).float()
    sin = sin[position_ids].unsqueeze(-2).float()
    out = []
    for x in (query, key):
        turned = None if x is None else _rotated(x, cos, sin, rotary_interleaved)
        out.append(x.copy_(turned) if inplace and x is not None else turned)
    return tuple(out)
