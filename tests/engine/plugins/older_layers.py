"""A vendor's backend of the older form: its methods take vLLM's layer first, and read it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_fl import BackendImplKind, OpImpl
from vllm_fl.dispatch.backends.base import Backend


class OlderBackend(Backend):
    name = "older"
    vendor = "older"

    def silu_and_mul(self, obj: Any, x: Tensor) -> Tensor:
        assert type(obj).__name__.startswith("SiluAndMul")
        half = x.shape[-1] // 2
        return F.silu(x[..., :half]) * x[..., half:]

    def rms_norm(self, obj: Any, x: Tensor, residual: Tensor | None = None) -> Any:
        y = x.float() if residual is None else x.float() + residual.float()
        normed = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + obj.variance_epsilon)
        normed = (normed.to(obj.weight.dtype) * obj.weight).to(x.dtype)
        return normed if residual is None else (normed, y.to(x.dtype))

    def rotary_embedding(
        self,
        obj: Any,
        query: Tensor,
        key: Tensor,
        cos: Tensor,
        sin: Tensor,
        position_ids: Tensor,
        rotary_interleaved: bool = False,
        inplace: bool = True,
    ) -> tuple[Tensor, Tensor]:
        assert obj.head_size == query.shape[-1] and not rotary_interleaved
        cos, sin = cos[position_ids].unsqueeze(1), sin[position_ids].unsqueeze(1)
        for x in (query, key):
            one, other = x.chunk(2, dim=-1)
            turned = torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1)
            x.copy_(turned)
        return query, key


def register_builtins(registry: Any) -> None:
    backend = OlderBackend()
    for op in ("silu_and_mul", "rms_norm", "rotary_embedding"):
        fn = getattr(backend, op)
        registry.register_impl(OpImpl(op, "vendor.older", BackendImplKind.VENDOR, fn, "older"))
