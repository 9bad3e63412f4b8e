"""What the operators behind the ops compute.

Written from torch_npu's own documentation of each (torch_npu/_op_plugin_docs.py of the wheel), in
fp32 with one rounding at the end, as the kernels do. What that documentation, or CANN's of the
kernel underneath (aclnnRopeWithSinCosCache), rules out is refused; so are tensors without elements,
of which neither says that a kernel takes them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .operators import EmulationError, numerics

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def demand(condition: bool, name: str, what: str) -> None:
    if not condition:
        raise EmulationError(f"npu::{name} takes {what}")


@numerics("npu_swiglu")
def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    demand(input.dtype in FLOATS, "npu_swiglu", "float32, float16 or bfloat16")
    demand(1 <= input.ndim <= 8, "npu_swiglu", "1 to 8 dimensions")
    demand(input.shape[dim] % 2 == 0, "npu_swiglu", "an even size")
    demand(input.numel() > 0, "npu_swiglu", "no empty tensors")
    left, right = input.float().chunk(2, dim)
    return (left * torch.sigmoid(left) * right).to(input.dtype)


@numerics("npu_clipped_swiglu")
def npu_clipped_swiglu(
    x: Tensor,
    *,
    group_index: Tensor | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> Tensor:
    name = "npu_clipped_swiglu"
    demand(x.dtype in FLOATS, name, "float32, float16 or bfloat16")
    demand(2 <= x.ndim <= 8, name, "2 to 8 dimensions")
    demand(x.is_contiguous(), name, "contiguous tensors")
    demand(x.shape[dim] % 2 == 0, name, "an even size")
    demand(x.numel() > 0, name, "no empty tensors")
    demand(group_index is None and dim in (-1, x.ndim - 1), name, "here all rows, by the last size")
    wide = x.float()
    a, b = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    a, b = a.clamp(max=limit), b.clamp(-limit, limit)
    return (a * torch.sigmoid(alpha * a) * (b + bias)).to(x.dtype)


@numerics("npu_geglu")
def npu_geglu(
    input: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> tuple[Tensor, Tensor]:
    demand(input.dtype in FLOATS, "npu_geglu", "float32, float16 or bfloat16")
    demand(approximate in (0, 1), "npu_geglu", "approximate 0 (none) or 1 (tanh)")
    demand(input.numel() > 0, "npu_geglu", "no empty tensors")
    left, right = input.float().chunk(2, dim)
    gated, other = (left, right) if activate_left else (right, left)
    gelu = torch.nn.functional.gelu(gated, approximate=("none", "tanh")[approximate])
    return (gelu * other).to(input.dtype), gelu.to(input.dtype)


@numerics("npu_rms_norm")
def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    demand(input.dtype in FLOATS, "npu_rms_norm", "float32, float16 or bfloat16")
    demand(2 <= input.ndim <= 8, "npu_rms_norm", "2 to 8 dimensions")
    demand(input.numel() > 0, "npu_rms_norm", "no empty tensors")
    demand(gamma.dtype == input.dtype, "npu_rms_norm", "gamma of input's dtype")
    demand(gamma.shape == input.shape[-gamma.ndim :], "npu_rms_norm", "gamma of input's last sizes")
    x = input.float()
    axes = tuple(range(-gamma.ndim, 0))
    rstd = torch.rsqrt(x.pow(2).mean(axes, keepdim=True) + epsilon)
    return (x * rstd * gamma.float()).to(input.dtype), rstd


@numerics("npu_add_rms_norm")
def npu_add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    demand(x1.shape == x2.shape, "npu_add_rms_norm", "x1 and x2 of one shape")
    demand(x1.dtype == x2.dtype, "npu_add_rms_norm", "x1 and x2 of one dtype")
    total = x1 + x2
    normed, rstd = npu_rms_norm(total, gamma, epsilon)
    return normed, rstd, total


@numerics("npu_mrope")
def npu_mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    *,
    mrope_section: list[int] | None = None,
    rotary_mode: str = "half",
    cache_mode: str = "default",
) -> tuple[Tensor, Tensor]:
    name = "npu_mrope"
    demand(positions.dtype == torch.int64, name, "int64 positions")
    sections = mrope_section if mrope_section and any(mrope_section) else None
    axes = positions.shape[:-1]
    demand(positions.shape[-1:] == query.shape[:1], name, "a position for each token")
    demand(axes == ((3,) if sections else ()), name, "three axes with sections, else one")
    demand(query.ndim == key.ndim == cos_sin_cache.ndim == 2, name, "two dimensions each")
    demand(query.dtype in FLOATS, name, "float32, float16 or bfloat16")
    demand(query.dtype == key.dtype == cos_sin_cache.dtype, name, "query, key, cache of one dtype")
    demand(query.numel() > 0 and key.numel() > 0, name, "no empty tensors")
    demand(rotary_mode in ("half", "interleave"), name, "rotary_mode half or interleave")
    demand(cache_mode == "default", name, "cache_mode default (an older CANN has no other)")
    step = 64 // query.itemsize
    rotary = cos_sin_cache.shape[1]
    demand(head_size % step == rotary % step == 0, name, f"sizes that are multiples of {step}")
    demand(rotary <= head_size, name, "a cache no wider than a head")
    cos, sin = cos_sin_cache.float()[positions].unsqueeze(-2).chunk(2, -1)
    if sections:
        demand(len(sections) == 3, name, "three sections")
        demand(sum(sections) == rotary // 2, name, "sections of all pairs")
        cos, sin = (
            torch.cat([part[axis] for axis, part in enumerate(table.split(sections, -1))], -1)
            for table in (cos, sin)
        )

    def turn(x: Tensor) -> Tensor:
        heads = x.float().unflatten(1, (-1, head_size))
        turning, rest = heads[..., :rotary], heads[..., rotary:]
        if rotary_mode == "half":
            a, b = turning.chunk(2, -1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        else:
            a, b = turning[..., ::2], turning[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        return torch.cat((turned, rest), -1).flatten(1).to(x.dtype)

    return turn(query), turn(key)


@numerics("npu_moe_gating_top_k")
def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    name = "npu_moe_gating_top_k"
    demand(x.dtype in FLOATS and x.ndim == 2, name, "two dimensions, floating")
    demand(x.numel() > 0, name, "no empty tensors")
    experts = x.shape[1]
    demand(experts <= 2048, name, "at most 2048 experts")
    demand(bias is None or (bias.dtype, bias.shape) == (x.dtype, x.shape[1:]), name, "a bias as x")
    demand(input_ids is None and tid2eid is None, name, "here no table of experts")
    demand(group_count > 0 and experts % group_count == 0, name, "groups of equal size")
    size = experts // group_count
    demand(size > 2, name, "groups of more than 2 experts")
    demand(-(-size // 32) * 32 * group_count <= 2048, name, "2048 experts, groups padded to 32")
    demand(1 <= k_group <= group_count and 1 <= k <= k_group * size, name, "k of what there is")
    demand(renorm == 0 and norm_type in (0, 1), name, "renorm 0, norm_type 0 or 1")
    demand(group_select_mode in (0, 1), name, "group_select_mode 0 or 1")
    normed = x.float().softmax(-1) if norm_type == 0 else x.float().sigmoid()
    choice = normed if bias is None else normed + bias.float()
    groups = choice.unflatten(-1, (group_count, size))
    worth = groups.topk(1 + group_select_mode, -1).values.sum(-1)
    taken = torch.zeros_like(worth, dtype=torch.bool)
    taken.scatter_(-1, worth.topk(k_group, -1).indices, True)
    ids = groups.masked_fill(~taken.unsqueeze(-1), -torch.inf).flatten(-2).topk(k, -1).indices
    y = normed.gather(-1, ids)
    if norm_type == 1:  # aclnnMoeGatingTopK: only a sigmoid's weights are divided by their sum
        y = y / (y.sum(-1, keepdim=True) + eps)
    shown = normed if out_flag else torch.zeros_like(normed)
    return (y * routed_scaling_factor).to(x.dtype), ids.int(), shown
