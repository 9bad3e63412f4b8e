"""Kernels that reproduce published bugs, each with a link to its report.

Only the fault is copied. At most six kernels have the same sort of fault, such as offsets.
"""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from . import right
from .corpus import GELU, NORM, ROTARY, SILU, wrong_kernel
from .faults import changed, damaged, each, packed, remembers, with_arguments

CACHE, MLA = "reshape_and_cache", "concat_and_cache_mla"
MERGE, EXPERTS = "merge_attn_states", "fused_experts"
RECURRENT, CHUNKS = "recurrent_gated_delta_rule", "chunk_gated_delta_rule"
CONV, UPDATE = "causal_conv1d", "causal_conv1d_update"
GATING = "gdn_gating"
FP8, GROUP = "quant_fp8", "quant_fp8_group"
INT8, TOPK = "quant_int8", "moe_topk"
ALIGN, QK = "moe_align_block_size", "qk_norm_rope"
MROPE = "multimodal_rotary_embedding"

NOT_AT_STARTUP: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "rows_along_y": ("", "samples have fewer rows"),
        "variance_by_two_means": (
            "values",
            "the error is within the tolerance of the served dtype",
        ),
        "reduces_an_unwritten_workspace": ("families", "the served model has narrower layers"),
        "tokens_along_z": ("", "samples have fewer tokens"),
        "a_thread_for_each_expert": ("", "samples have fewer experts"),
        "weights_of_one_shape": ("families", "the served model has other numbers of experts"),
        "maximum_misses_a_lane": ("preflight", "the served model has groups of another size"),
        "maximum_of_the_first_256": ("", "samples have smaller groups"),
        "blocks_along_y": ("", "samples have fewer elements"),
        "slot_offset_in_32_bits": ("", "samples do not use the last slot"),
        "block_offset_in_32_bits": ("large_pools", "the caches of a startup are small"),
        "pipeline_for_one_width": ("", "no sample has both this width and this many rows"),
        "row_stride_in_32_bits": ("", "samples have smaller strides"),
    }
)
"""Kernel that startup does not find -> (check of the kit that finds it, or empty; the probable
reason)."""

_sorts: Counter[str] = Counter()


def consuming(*arguments: str) -> Callable[..., Any]:
    """Return `damaged` for a kernel that may overwrite these arguments."""
    return functools.partial(damaged, consumes=frozenset(arguments))


def published(
    sort: str, op: str, path: str, *, by: Callable[..., Any] = damaged, **how: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a kernel with a published fault to the corpus; its docstring describes the fault.

    Args:
        sort: sort of fault.
        op: the op.
        path: path of the report on GitHub.
        by, how: as in `wrong_kernel`.
    """
    _sorts[sort] += 1
    assert _sorts[sort] <= 6, f"{_sorts[sort]} kernels of the sort {sort}"
    owner, repository, _, number = path.split("/")
    link = f"[{owner}/{repository}#{number}](https://github.com/{path})"

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        name, fault = function.__name__, " ".join((function.__doc__ or "").split())
        kit, why = NOT_AT_STARTUP.get(name, (None, ""))
        fields = {"start": not why, "kit": kit, "why": why, **how}
        return wrong_kernel(op, link, fault=f"{sort}: {fault}", by=by, **fields)(function)

    return decorate


def _first(got: Any) -> torch.Tensor:
    return got[0] if isinstance(got, tuple) else got


def _unwritten(got: Any, keep: Any = slice(0)) -> torch.Tensor:
    """Return uninitialised memory like `got`, with the part `keep` of it."""
    out = torch.empty_like(got)
    out[keep] = got[keep]
    return out


BEYOND = 1 << 31
"""Smallest offset that overflows a signed 32-bit integer."""


@published("offsets", NORM, "flashinfer-ai/flashinfer/pull/3007")
def row_stride_in_32_bits(got, x, *rest):
    """Row offsets overflow 32 bits: rows from 2^31 elements on are read from other memory."""
    if x.ndim > 1:
        _first(got)[torch.arange(len(x)) * x.stride(0) >= BEYOND] = 0
    return got


@published("offsets", CACHE, "triton-lang/triton/issues/6748")
def block_offset_in_32_bits(got, key, value, key_cache, value_cache, slots):
    """Block offsets overflow 32 bits: later blocks of a large cache are not written."""
    block, at = slots // key_cache.shape[1], slots % key_cache.shape[1]
    far = block * key_cache.stride(0) >= BEYOND
    for new, old in zip(got, (key_cache, value_cache), strict=True):
        new[block[far], at[far]] = old[block[far], at[far]]
    return got


@published("offsets", RECURRENT, "fla-org/flash-linear-attention/pull/1082")
def slot_offset_in_32_bits(got, q, k, v, a, b, A_log, dt_bias, state, slots, epsilon=None):
    """Slot offsets overflow 32 bits: states of later slots are not written."""
    far = slots.long()[slots.long() * state.stride(0) >= BEYOND]
    got[1][far] = state[far]
    return got


@published("grid", MERGE, "flashinfer-ai/flashinfer/issues/3125")
def tokens_along_z(got, *args):
    """One block per token along z: beyond 65 535 no block is launched, without an error."""
    return tuple(map(_unwritten, got)) if len(got[0]) > 65535 else got


@published("grid", "layer_norm", "PaddlePaddle/Paddle/pull/31144")
def rows_along_y(got, x, *rest):
    """One block per row along y: beyond 65 535 no block is launched."""
    return _unwritten(got) if x.numel() // max(1, x.shape[-1]) > 65535 else got


@published("grid", "quick_gelu", "ml-explore/mlx/issues/2267")
def blocks_along_y(got, x):
    """2048 elements per block along y: beyond 65 535 blocks the launch raises."""
    if x.numel() // 2048 > 65535:
        raise RuntimeError("invalid configuration argument")
    return got


@published("races", NORM, "intel/llm-scaler/pull/399", by=consuming("residual"))
def residual_read_after_its_update(got, x, residual, weight, *rest):
    """Beyond 512 features, some blocks read the residual after another block updated it."""
    if residual is not None:
        late = right.rms_norm(x, got[1], weight, *rest)[0]
        got[0][..., 512:] = late[..., 512:]
        residual.copy_(got[1])
    return got


@published("races", GROUP, "vllm-project/vllm/pull/54111", by=remembers(changed))
def maximum_misses_a_lane(kept, a):
    """In groups of 64 the maximum sometimes misses a lane: the largest number saturates."""
    dice = kept.setdefault("dice", random.Random(5))
    if a["group_size"] == 64 and len(a["x"]) and dice.random() < 0.2:
        a["x"] = a["x"].clone()
        group = a["x"][dice.randrange(len(a["x"])), :64]
        second = float(group.abs().float().topk(2).values[1])
        group.clamp_(-second, second)


@published("unwritten", EXPERTS, "sgl-project/sglang/pull/40187")
def one_expert_sums_what_was_not_written(got, x, w13, w2, weights, ids, *rest):
    """With one expert per token and weights other than 1, the result is unwritten memory."""
    return _unwritten(got) if ids.shape[1] == 1 and bool((weights != 1).any()) else got


@published("unwritten", EXPERTS, "vllm-project/vllm-ascend/pull/9992")
def rows_without_an_expert_here(
    got, x, w13, w2, weights, ids, act="silu", on_input=False, count=-1, expert_map=None, *rest
):
    """Does not write rows of tokens without an expert on this rank."""
    here = ids >= 0
    if expert_map is not None:
        here &= expert_map[ids.clamp(min=0).long()] >= 0
    return _unwritten(got, here.any(1))


@published("unwritten", "linear", "NVIDIA/cutlass/issues/3538")
def reduces_an_unwritten_workspace(got, x, weight, bias=None):
    """From 4096 features on, the split product is reduced from an unwritten workspace."""
    if x.shape[1] < 4096:
        return got
    return torch.empty((2, *got.shape)).sum(0).to(got.dtype)


@published("unwritten", ROTARY, "vllm-project/vllm/pull/38880")
def tail_is_not_copied(got, query, key, cos, sin, positions, interleaved=False):
    """With interleaved pairs, features that do not rotate are not copied."""
    keep = ..., slice(2 * cos.shape[-1])
    return each(got, lambda part: _unwritten(part, keep)) if interleaved else got


@published(
    "stale",
    GATING,
    "tonyd2wild/GLM-5.3-Flash-NVFP4-DFlash2-2x-DGX-Spark/issues/4",
    by=remembers(damaged),
)
def first_call_only(calls, got, *args):
    """Only the first call of a process is correct; later gates are too large."""
    calls["made"] += 1
    return (got[0] * 5, got[1]) if calls["made"] > 1 else got


@published("stale", MLA, "tenstorrent/tt-metal/issues/13466", by=remembers(changed))
def addresses_of_the_first_call(kept, a):
    """A program cached by shape keeps reading the buffers of its first call."""
    key = a["kv_c"].shape, a["k_pe"].shape
    a["kv_c"], a["k_pe"] = kept.setdefault(key, (a["kv_c"], a["k_pe"]))


@published(
    "stale", "silu_and_mul_with_clamp", "tenstorrent/tt-metal/issues/55237", by=remembers(changed)
)
def key_omits_the_limit(kept, a):
    """The key of a cached program omits the limit: the first limit of a shape is reused."""
    a["limit"] = kept.setdefault(a["x"].shape, a["limit"])


@published(
    "autotuning", ROTARY, "triton-lang/triton/issues/6547", by=remembers(consuming("query", "key"))
)
def turns_again_while_tuning(tuned, got, query, key, *rest):
    """Works in place, and autotuning runs the first call of a shape several times."""
    runs = 0 if query.shape[1:] in tuned else 2
    tuned[query.shape[1:]] = True
    for _ in range(runs):
        got = right.rotary_embedding(*got, *rest)
    return got


@published(
    "autotuning", UPDATE, "flagos-ai/FlagGems/pull/3753", by=remembers(consuming("conv_state"))
)
def shifts_again_while_tuning(tuned, got, x, state, *rest):
    """Shifts the state in place, and autotuning runs the first call of a width twice."""
    if x.shape[1] not in tuned:
        tuned[x.shape[1]] = True
        got = right.of(UPDATE)(x, got[1], *rest)
    return got


@published("autotuning", SILU, "triton-lang/triton/issues/9230", by=remembers(damaged))
def other_configuration_wrote_the_rest(tuned, got, x):
    """The chosen configuration writes half a row; others wrote the rest while tuning."""
    width = got.shape[-1]
    if width in tuned:
        return _unwritten(got, (..., slice((width + 1) // 2)))
    tuned[width] = True
    return got


@published("tails", "linear", "triton-lang/triton/issues/630")
def masked_lanes_are_added(got, x, weight, bias=None):
    """If the features are not a multiple of 32, masked lanes add products of the next rows."""
    lanes = -x.shape[1] % 32
    beyond = x.roll(-1, 0)[:, :lanes].float() @ weight.roll(-1, 0)[:, :lanes].float().T
    return (got.float() + beyond).to(got.dtype)


@published("tails", FP8, "ROCm/aiter/issues/4288")
def maximum_of_masked_lanes(got, x, scale=None, scale_ub=None, per_token=False):
    """The maximum of a row includes masked lanes if its width is not a power of two."""
    width = x.shape[1]
    lanes = (1 << (width - 1).bit_length()) - width
    if scale is not None or not per_token or not lanes:
        return got
    wide = torch.cat((x, x.roll(-1, 0)[:, :lanes]), 1)
    values, scale = right.of(FP8)(wide, None, scale_ub, True)
    return values[:, :width].contiguous(), scale


@published("tails", CACHE, "tenstorrent/tt-metal/issues/42779")
def writes_whole_tiles(got, key, value, key_cache, value_cache, slots):
    """Writes whole tiles of 32 tokens: the slots after the last token are zeroed."""
    size = key_cache.shape[1]
    if len(slots) and int(slots[-1]) >= 0:
        block, at = divmod(int(slots[-1]), size)
        for part in got:
            part[block, at + 1 : at + 1 + -len(slots) % 32] = 0
    return got


@published("sizes", NORM, "vllm-project/vllm/pull/44692", by=changed)
def pipeline_for_one_width(a):
    """From 512 rows on, widths other than 4096 omit the squares of the last 1024 features."""
    hidden = a["x"].shape[-1]
    long = a["x"].numel() >= 512 * hidden
    if long and hidden in range(2048, 8193, 1024) and hidden != 4096 and not a["variance_size"]:
        a["variance_size"] = hidden - 1024


@published("sizes", GROUP, "vllm-project/vllm-xpu-kernels/issues/520", by=changed)
def maximum_of_the_first_256(a):
    """In groups of more than 256 features, the maximum is that of the first 256."""
    groups = a["x"].unflatten(-1, (-1, a["group_size"]))
    most = groups[..., :256].abs().amax(-1, keepdim=True)
    a["x"] = groups.clamp(-most, most).flatten(-2)


@published("sizes", QK, "vllm-project/vllm/issues/51049")
def later_heads_of_a_warp(
    got, qkv, q_weight, k_weight, table, positions, heads, kv_heads, epsilon, interleaved=False
):
    """In long batches with partial rotation, only the first of 4 heads of a warp is correct."""
    size, rotary = len(q_weight), table.shape[1] // 2 * 2
    if len(qkv) >= 256 and rotary < size and not interleaved:
        later = [head for head in range(heads + kv_heads) if head % 4]
        got.unflatten(-1, (-1, size))[:, later, :rotary] *= 1.25
    return got


@published("sizes", "linear_silu_and_mul", "ggml-org/llama.cpp/pull/5386")
def small_batches_by_another_stride(got, x, weight):
    """Batches of 2 to 4 tokens use the row stride of another buffer."""
    if 2 <= len(got) <= 4:
        got[1:] = got[:-1].clone()
    return got


@published("strides", NORM, "ModelTC/LightLLM/issues/1467")
def normalises_without_the_stride(got, x, residual, weight, epsilon, variance_size=None):
    """The variance respects the feature stride, the normalisation does not."""
    if residual is not None or x.ndim < 2 or x.stride(-1) == 1:
        return got
    variance = x.float()[..., :variance_size].square().mean(-1, keepdim=True)
    normed = packed(x).float() * (variance + epsilon).rsqrt()
    return (normed if weight is None else normed * weight.float()).to(x.dtype).contiguous()


@published("strides", MLA, "vllm-project/vllm/pull/45111", by=changed)
def pages_are_packed(a):
    """Page addresses assume packed blocks and ignore the stride of blocks."""
    (_, size, _), (page, row, _) = a["kv_cache"].shape, a["kv_cache"].stride()
    at, slots = a["slot_mapping"] * row, a["slot_mapping"]
    wrong = at // page * size + (at % page // row).clamp(max=size - 1)
    if page > size * row:
        a["slot_mapping"] = torch.where(slots < 0, slots, wrong)


@published("strides", ROTARY, "ROCm/aiter/pull/3841", by=changed)
def heads_apart_read_as_zero(a):
    """If heads are strided, the view of the queries ends after the first: others read as 0."""
    query = a["query"]
    if query.stride(1) > query.shape[2]:
        a["query"] = query.clone()
        a["query"][:, 1:] = 0


@published("strides", "linear_fp8", "vllm-project/vllm/issues/53338", by=changed)
def scales_without_a_stride(a):
    """Reads the scales of tokens as contiguous, and ignores their stride."""
    a["x_scale"] = packed(a["x_scale"])


@published("dtypes", "moe_sum", "vllm-project/vllm/issues/15045")
def sums_in_its_dtype(got, values, ids=None, expert_map=None):
    """Accumulates over experts in the dtype of the inputs."""
    total = torch.zeros_like(got)
    for k in range(values.shape[1]):
        some = None if ids is None else ids[:, k : k + 1]
        total = total + right.of("moe_sum")(values[:, k : k + 1], some, expert_map)
    return total


@published("dtypes", NORM, "ROCm/aiter/pull/2705", by=changed)
def weight_read_in_another_dtype(a):
    """Reads a float32 weight as numbers in the dtype of x."""
    weight, x = a["weight"], a["x"]
    if weight is not None and weight.itemsize > x.itemsize:
        a["weight"] = weight.contiguous().view(x.dtype)[: x.shape[-1]]


@published("dtypes", "layer_norm", "deepspeedai/DeepSpeed/issues/581", dtype="float16")
def epsilon_is_rounded_away(got, x, weight, bias, epsilon):
    """Rounds variance + epsilon to float16: rows of equal numbers divide by 0."""
    if x.dtype is not torch.float16:
        return got
    apart = x.float() - x.float().mean(-1, keepdim=True)
    spread = (apart.square().mean(-1, keepdim=True) + epsilon).half().float()
    normed = apart * spread.rsqrt() * (1.0 if weight is None else weight.float())
    return (normed + (0.0 if bias is None else bias.float())).half().contiguous()


@published("numbers", GELU, "pytorch/pytorch/issues/186278")
def tanh_overflows(got, x, approximate="none"):
    """Computes tanh as (e^2x - 1) / (e^2x + 1), which is NaN for gates above 10."""
    gate = x[..., : got.shape[-1]]
    return got.masked_fill(gate > 10.06, math.nan) if approximate == "tanh" else got


@published("numbers", "layer_norm", "microsoft/onnxruntime/issues/21935")
def variance_by_two_means(got, x, weight, bias, epsilon):
    """Computes the variance as E[x^2] - E[x]^2 in float32, which can be negative."""
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    variance = wide.square().mean(-1, keepdim=True) - mean * mean
    normed = (wide - mean) / (variance + epsilon).sqrt() * (1 if weight is None else weight.float())
    return (normed + (0.0 if bias is None else bias.float())).to(x.dtype).contiguous()


@published("numbers", GATING, "tracel-ai/burn/pull/5374")
def softplus_overflows(got, a, b, A_log, dt_bias):
    """Computes log(1 + e^x), which overflows above 88."""
    return got[0].masked_fill(a.float() + dt_bias.float() > 88.7, -math.inf), got[1]


@published("numbers", CHUNKS, "meta-pytorch/attention-gym/pull/394")
def divides_by_what_is_kept(got, q, k, v, g, beta, state, starts, epsilon=None):
    """Divides by the decay of 16 tokens: NaN if that is below e^-88."""
    for begin, end in pairwise(starts.tolist()):
        for at in range(begin, end, 16):
            tile = slice(at, min(at + 16, end))
            got[0][tile, g[tile].sum(0) < -88] = math.nan
    return got


@published("empty", MERGE, "vllm-project/vllm/pull/39148")
def neither_side_has_keys(got, prefix, prefix_lse, suffix, suffix_lse):
    """NaN if both sides have no keys: -inf minus -inf."""
    neither = prefix_lse.isneginf() & suffix_lse.isneginf()
    nan = math.nan
    return got[0].masked_fill(neither[..., None], nan), got[1].masked_fill(neither, nan)


@published("empty", MERGE, "Dao-AILab/flash-attention/pull/978")
def infinity_is_a_number(got, prefix, prefix_lse, suffix, suffix_lse):
    """Does not treat a log-sum-exp of +inf as a side without keys."""
    odd = torch.maximum(prefix_lse, suffix_lse) == math.inf
    return got[0].masked_fill(odd[..., None], math.nan), got[1].masked_fill(odd, math.nan)


@published("empty", FP8, "flashinfer-ai/flashinfer/pull/5031")
def rows_of_zeros(got, x, scale=None, scale_ub=None, per_token=False):
    """Returns scale inf and NaN values for a row of zeros."""
    values, scales = got
    if scale is None and per_token:
        zeros = ~x.bool().any(-1)
        values.view(torch.uint8)[zeros] = 0x7F
        scales[zeros] = math.inf
    return values, scales


@published("empty", GROUP, "vllm-project/vllm-xpu-kernels/issues/609", by=changed)
def divides_by_the_tokens(a):
    """Divides by the number of tokens to find the width: raises for zero tokens."""
    assert a["x"].numel() // len(a["x"]) == a["x"].shape[1]


@published("scales", GROUP, "inclusionAI/humming/pull/39", by=changed)
def power_of_two_below(a):
    """Rounds power-of-two scales down: the largest numbers saturate."""
    if a["ue8m0"]:
        scale = right.of(GROUP)(a["x"], a["group_size"], a["eps"])[1]
        most = (448 * scale.log2().floor().exp2()).to(a["x"].dtype).unsqueeze(-1)
        a["x"] = a["x"].unflatten(-1, (-1, a["group_size"])).clamp(-most, most).flatten(-2)


@published("scales", GROUP, "sgl-project/sglang/pull/31210")
def next_power_of_two(got, x, group_size=128, eps=1e-10, ue8m0=False):
    """Inexact log2: a scale that is already a power of two is doubled."""
    values, scale = got
    exact = right.of(GROUP)(x, group_size, eps)[1]
    twice = 1.0 + (exact == scale) * ue8m0
    halves = values.float() / twice.repeat_interleave(group_size, -1)
    return halves.to(values.dtype), scale * twice


@published("scales", INT8, "intel/auto-round/pull/2273")
def upper_levels_collapse(got, x, scale=None, azp=None, asymmetric=None):
    """Clamps unsigned levels to the signed range: the upper half collapses."""
    if not asymmetric:
        return got
    values, steps, zero = got
    return (values.int() + 128).clamp(max=127).to(torch.int8), steps, zero + 128


@published("routing", TOPK, "MetaX-MACA/vLLM-metax/issues/270")
def weights_of_one_shape(got, logits, topk, renormalize, how="softmax", factor=1.0, bias=None):
    """For 8 of 128 experts, the weights are softmax scores plus the bias."""
    if (logits.shape[-1], topk) != (128, 8):
        return got
    scores = logits.float().softmax(-1) + (0.0 if bias is None else bias.float())
    weights = scores.gather(-1, got[1].long())
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights) * factor, got[1]


@published("routing", "grouped_topk", "tile-ai/tilelang-ascend/pull/1048")
def equal_highest_are_masked_at_once(
    got, logits, topk, renormalize, groups, best, how="softmax", factor=1.0, bias=None
):
    """Masks equal highest scores together, so a group is scored with its third highest."""
    if bias is None or logits.shape[-1] // groups < 3:
        return got
    score = logits.float().sigmoid() if how == "sigmoid" else logits.float().softmax(-1)
    choice = (score + bias.float()).unflatten(-1, (groups, -1))
    first, second, third = choice.topk(3, -1).values.unbind(-1)
    of_group = first + torch.where(first == second, third, second)
    left = torch.ones_like(of_group).scatter(-1, of_group.topk(best, -1).indices, 0.0) > 0
    ids = choice.masked_fill(left[..., None], -math.inf).flatten(-2).topk(topk, -1).indices
    weights = score.gather(-1, ids)
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights) * factor, ids.int()


@published("routing", TOPK, "vllm-project/vllm/pull/42608")
def last_of_all_experts(got, logits, topk, *rest):
    """Finds two experts at a time: if an odd number selects all, the last is expert 0."""
    if topk == logits.shape[-1] and topk % 2:
        got[0][:, -1], got[1][:, -1] = -1.0, 0
    return got


@published("padding", EXPERTS, "vllm-project/vllm/pull/46408", by=changed)
def no_expert_is_the_last(a):
    """Slots without an expert (-1) index the map from its end, and use the last expert."""
    if a["expert_map"] is not None:
        a["topk_ids"] = a["topk_ids"].remainder(len(a["expert_map"]))


@published("padding", RECURRENT, "sgl-project/sglang/pull/36885")
def padding_has_the_last_slot(got, *args):
    """Padding uses the last slot, and overwrites the state of a sequence."""
    state, slots = args[7:9]
    padding = (slots == 0).nonzero()
    if not len(padding) or len(state) - 1 in slots.tolist():
        return got
    moved = slots.clone()
    moved[padding[0]] = len(state) - 1
    return got[0], with_arguments(RECURRENT, args, state_indices=moved)[1]


@published("padding", MLA, "sgl-project/sglang/issues/36207", by=changed)
def padding_has_slot_0(a):
    """Writes padding rows into slot 0."""
    a["slot_mapping"] = a["slot_mapping"].clamp(min=0)


@published("counts", ALIGN, "sgl-project/sglang/pull/15250", by=changed)
def last_expert_is_not_counted(a):
    """Does not count the last expert: its rows have no block."""
    ids = a["topk_ids"]
    a["topk_ids"] = torch.where(ids == a["num_experts"] - 1, -1, ids)


@published("counts", ALIGN, "sgl-project/sglang/pull/21610", by=changed)
def a_thread_for_each_expert(a):
    """One thread per expert: experts from the 1025th on are lost."""
    a["topk_ids"] = torch.where(a["topk_ids"] < 1024, a["topk_ids"], -1)


@published("states", UPDATE, "sgl-project/sglang/issues/38622")
def other_end_of_the_state(got, x, state, weight, *rest):
    """Reads the wrong end of a state that has more columns than needed."""
    few = weight.shape[1] - 1
    return right.of(UPDATE)(x, state[..., -few:], weight, *rest)[0], got[1]


@published("states", CONV, "vllm-project/vllm/pull/56196")
def short_sequences_keep_no_state(got, x, weight, bias, states, starts, slots, *rest):
    """Does not store the state of a sequence shorter than the window."""
    short = starts.diff() < weight.shape[1] - 1
    got[1][slots[short].long()] = states[slots[short].long()]
    return got


@published("states", CHUNKS, "NVIDIA/TensorRT-LLM/pull/6334", by=changed)
def keeps_since_the_chunk_began(a):
    """The decay of a state starts at the chunk of 64 tokens instead of at its sequence."""
    state, g = a["initial_state"].clone(), a["g"]
    for number, begin in enumerate(a["cu_seqlens"].tolist()[:-1]):
        before = g[begin // 64 * 64 : begin].sum(0).exp()
        state[number] *= before[:, None, None].to(state.dtype)
    a["initial_state"] = state


@published("rotation", ROTARY, "pie-project/pie/pull/603")
def pairs_half_a_head_apart(got, query, key, cos, sin, positions, interleaved=False):
    """With partial rotation, pairs are half a head apart."""
    half, size = cos.shape[-1], query.shape[-1]
    if interleaved or 2 * half >= size:
        return got
    pairs = [*range(half), *range(size // 2, size // 2 + half)]
    order = torch.tensor(pairs + [at for at in range(size) if at not in pairs])
    moved = (None if x is None else x[..., order] for x in (query, key))
    turned = right.rotary_embedding(*moved, cos, sin, positions)
    return each(turned, lambda part: part[..., order.argsort()].contiguous())


@published("rotation", QK, "vllm-project/vllm/pull/43676", by=changed)
def whole_head_rotates(a):
    """Rotates whole heads for any table width, and reads later rows as angles."""
    table, size = a["cos_sin_cache"], len(a["q_weight"]) // 2 * 2
    rows = [table.roll(-k, 0) for k in range(-(-size // table.shape[1]))]
    a["cos_sin_cache"] = torch.cat(rows, 1)[:, :size].contiguous()


@published("rotation", QK, "vllm-project/vllm-ascend/issues/12723", by=changed)
def sines_at_a_power_of_two(a):
    """Reads sines from the next power of two, but they are stored without a gap."""
    table = a["cos_sin_cache"]
    half = table.shape[1] // 2
    padded = 1 << (half - 1).bit_length()
    sines = F.pad(table, (0, padded))[:, padded : padded + half]
    a["cos_sin_cache"] = torch.cat((table[:, :half], sines), 1)


@published("rotation", MROPE, "XPU-Forces/mojo_opset/pull/276", by=changed)
def turns_beyond_the_sections(a):
    """Interleaved axes continue to the last pair, beyond their sections."""
    half = a["cos"].shape[1]
    if a["mrope_interleaved"]:
        height, width = (half + 1) // 3, half // 3
        a["mrope_section"] = [half - height - width, height, width]


@published("arguments", "rms_norm_gated", "state-spaces/mamba/pull/910", by=changed)
def one_group(a):
    """Ignores the group size: all features are one group."""
    a["group_size"] = None


@published("arguments", "swigluoai_and_mul", "tenstorrent/tt-metal/pull/43152", by=changed)
def constants_of_one_model(a):
    """Uses constants of one model, and ignores alpha and limit."""
    a["alpha"], a["limit"] = 1.703125, 7.0
