"""The vendor's operators, `torch.ops.acme`: each counts its calls, also in compiled graphs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from .counting import CALLS


@custom_op("acme::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    CALLS["RMSNorm"] += 1
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@custom_op("acme::silu_and_mul", mutates_args=())
def silu_and_mul(x: Tensor) -> Tensor:
    CALLS["SiluAndMul"] += 1
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@silu_and_mul.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@custom_op("acme::rotate", mutates_args=())
def rotate(x: Tensor, positions: Tensor, table: Tensor, head_size: int) -> Tensor:
    """Rotate halves of heads; all features rotate. `table`: (positions, cos then sin)."""
    CALLS["RotaryEmbedding"] += 1
    cos, sin = table[positions].to(x.dtype).unsqueeze(1).chunk(2, dim=-1)
    first, second = x.view(len(x), -1, head_size).chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.reshape(x.shape)


@rotate.register_fake
def _(x: Tensor, positions: Tensor, table: Tensor, head_size: int) -> Tensor:
    return x.new_empty(x.shape)


@custom_op("acme::seen", mutates_args=())
def seen(x: Tensor, layer: str) -> Tensor:
    """A copy of the input of a layer that uses vLLM's kernels; counts the call."""
    CALLS[layer] += 1
    return x.clone()


@seen.register_fake
def _(x: Tensor, layer: str) -> Tensor:
    return torch.empty_like(x)
