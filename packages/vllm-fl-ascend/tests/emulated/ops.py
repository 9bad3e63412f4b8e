"""Numerics of the operators that implement the ops. From torch_npu's documentation of each
(torch_npu/_op_plugin_docs.py of the wheel), in fp32 with one rounding at the end, like the kernels.
Calls excluded by this documentation, or by CANN's for the underlying kernel
(aclnnRopeWithSinCosCache), raise an error; so do tensors without elements, since neither
documentation mentions them as supported."""

from __future__ import annotations

import torch
from torch import Tensor

from .operators import demand, numerics

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


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


@numerics("npu_fast_gelu")
def npu_fast_gelu(input: Tensor) -> Tensor:
    """The second formula of its documentation, for Atlas A2 and A3."""
    demand(input.dtype in FLOATS, "npu_fast_gelu", "float32, float16 or bfloat16")
    demand(input.ndim <= 8, "npu_fast_gelu", "at most 8 dimensions")
    demand(input.numel() > 0, "npu_fast_gelu", "no empty tensors")
    x = input.float()
    return (x / (1 + torch.exp(-1.702 * x))).to(input.dtype)


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
    sections = mrope_section if mrope_section and mrope_section[0] > 0 else None
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
    demand(positions.min() >= 0 and positions.max() < len(cos_sin_cache), name, "known positions")
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


@numerics("npu_moe_init_routing_v2")
def npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: list[int] | None = None,
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    name = "npu_moe_init_routing_v2"
    demand(x.dtype in FLOATS and x.ndim == 2, name, "x of floats, in 2 dimensions")
    demand(expert_idx.dtype == torch.int32 and expert_idx.ndim == 2, name, "int32 ids of tokens")
    demand(expert_idx.shape[0] == x.shape[0], name, "ids for each token")
    demand(x.is_contiguous() and expert_idx.is_contiguous(), name, "contiguous tensors")
    demand(x.numel() > 0, name, "no empty tensors")
    demand(scale is None and offset is None and quant_mode == -1, name, "here nothing to quantise")
    demand(drop_pad_mode == 0, name, "drop_pad_mode 0 alone")
    demand(expert_tokens_num_type == 1 and expert_tokens_num_flag, name, "here type 1 with flag")
    demand(active_expert_range == [0, expert_num] and expert_num > 0, name, "here all experts")
    demand(active_num in (-1, 0, expert_idx.numel()), name, "here all rows as active")
    demand(row_idx_type == 0 and x_dtype is None, name, "here row_idx_type 0")
    demand(int(expert_idx.max()) < expert_num, name, "no id beyond the experts")
    flat = expert_idx.flatten().long()
    order = flat.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    counts = flat.bincount(minlength=expert_num)
    undefined = torch.full((len(flat),), torch.nan)
    return x[order // expert_idx.shape[1]], places.to(torch.int32), counts, undefined


@numerics("npu_grouped_matmul")
def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    **others: object,
) -> list[Tensor]:
    name = "npu_grouped_matmul"
    given = {key for key, value in others.items() if value not in (None, 0)}
    demand(not given and not bias, name, f"here no {', '.join(sorted(given)) or 'bias'}")
    demand(len(x) == len(weight) == 1, name, "here one tensor each")
    demand((split_item, group_type, group_list_type) == (2, 0, 1), name, "here counts of rows")
    (rows,), (matrices,) = x, weight
    demand(rows.dtype == matrices.dtype and rows.dtype in FLOATS, name, "floats of one dtype")
    demand(rows.ndim == 2 and matrices.ndim == 3, name, "rows, and a matrix for each group")
    demand(rows.shape[1] == matrices.shape[1], name, "matrices of the rows' width")
    demand(rows.shape[1] <= 65535, name, "rows of up to 65535")
    demand(group_list is not None and group_list.dtype == torch.int64, name, "an int64 group_list")
    assert group_list is not None
    demand(group_list.shape == matrices.shape[:1], name, "a count for each matrix")
    demand(int(group_list.sum()) == rows.shape[0], name, "counts of all rows")
    parts = rows.float().split(group_list.tolist())
    products = [part @ matrix.float() for part, matrix in zip(parts, matrices, strict=True)]
    return [torch.cat(products).to(rows.dtype)]


@numerics("npu_moe_token_unpermute")
def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> Tensor:
    name = "npu_moe_token_unpermute"
    demand(permuted_tokens.dtype == torch.bfloat16, name, "bfloat16 tokens")
    demand(permuted_tokens.ndim == 2 and sorted_indices.ndim == 1, name, "rows and their places")
    demand(sorted_indices.dtype in (torch.int32, torch.int64), name, "integer places")
    demand(not padded_mode and restore_shape is None, name, "padded_mode False alone")
    demand(probs is not None and probs.dtype == torch.bfloat16, name, "here bfloat16 probs")
    assert probs is not None
    demand(probs.numel() == sorted_indices.numel(), name, "a weight for each place")
    rows = permuted_tokens.float()[sorted_indices.long()].unflatten(0, tuple(probs.shape))
    return (rows * probs.float().unsqueeze(-1)).sum(1).to(permuted_tokens.dtype)


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


@numerics("npu_attention_update")
def npu_attention_update(
    lse: list[Tensor], local_out: list[Tensor], update_type: int
) -> tuple[Tensor, Tensor]:
    name = "npu_attention_update"
    demand(1 <= len(lse) == len(local_out) <= 16, name, "1 to 16 parts")
    demand(update_type in (0, 1), name, "update_type 0 or 1")
    for sums, out in zip(lse, local_out, strict=True):
        demand(sums.dtype == torch.float32 and sums.ndim == 1, name, "float32 sums in one row")
        demand(bool(sums.isfinite().all()), name, "finite sums")
        demand(out.dtype in FLOATS, name, "float32, float16 or bfloat16")
        demand(out.dtype == local_out[0].dtype, name, "outputs of one dtype")
        demand(out.ndim == 2 and out.shape == local_out[0].shape, name, "outputs of one shape")
        demand(len(out) == len(sums) > 0, name, "a sum for each row, and no empty tensors")
        demand(out.shape[1] % 8 == 0 and 8 <= out.shape[1] <= 512, name, "heads of 8 * n to 512")
        demand(sums.is_contiguous() and out.is_contiguous(), name, "contiguous tensors")
    most = torch.stack(lse).amax(0)
    total = most + torch.stack([(sums - most).exp() for sums in lse]).sum(0).log()
    merged = torch.zeros_like(local_out[0], dtype=torch.float32)
    for sums, out in zip(lse, local_out, strict=True):
        merged += out.float() * (sums - total).exp()[:, None]
    # Without update_type 1 the second result is undefined.
    return merged.to(local_out[0].dtype), total if update_type else torch.full_like(
        total, torch.nan
    )


@numerics("npu_dynamic_quant")
def npu_dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    name = "npu_dynamic_quant"
    demand(input.dtype in FLOATS[1:], name, "float16 or bfloat16")
    demand(input.ndim > 1, name, "more than one dimension")
    demand(input.numel() > 0, name, "no empty tensors")
    demand(smooth_scales is None and group_index is None, name, "here no smoothing")
    demand(dst_type in (None, 1) and quant_mode == "pertoken", name, "here int8 by token")
    wide = input.float()
    scale = wide.abs().amax(-1) / 127
    value = (wide / scale.unsqueeze(-1)).nan_to_num(0.0).round()
    return value.to(torch.int8), scale
