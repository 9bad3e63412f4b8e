"""Correct kernels with unusual methods, which no check may disable.

They are called by position, with arguments that keep the contract; other calls raise before.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from . import right
from .corpus import GELU, NORM, ROTARY, SILU, wrong

MERGE, EXPERTS = "merge_attn_states", "fused_experts"
CACHE, CHUNKS = "reshape_and_cache", "chunk_gated_delta_rule"
RECURRENT = "recurrent_gated_delta_rule"
LINEAR, FP8, INT8, TOPK, SUM = "linear", "quant_fp8", "quant_int8", "moe_topk", "moe_sum"


def unusual(op: str, **fields: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the decorated correct function to the kernels, with `fields` of its OpImpl; its docstring
    describes its method."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        kernel = right.checked(op, function)
        make = functools.update_wrapper(lambda: (kernel, fields), function)
        method = " ".join((function.__doc__ or "").split())
        wrong(op, "", fault=method, start=False, kit="", why="it is correct")(make)
        return function

    return decorate


def _silu(gate: Tensor) -> Tensor:
    return gate * gate.sigmoid()


@unusual(SILU)
def silu_by_tanh(x):
    """Computes the sigmoid as half of 1 plus a tanh, in float64."""
    gate, up = x.double().chunk(2, -1)
    return (gate / 2 * (1 + (gate / 2).tanh()) * up).to(x.dtype).contiguous()


@unusual("mul_and_silu")
def rows_by_two_threads(x):
    """Computes halves of the rows in two threads of a new pool."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).float()
    with ThreadPoolExecutor(2) as pool:
        parts = pool.map(lambda part: F.silu(part.chunk(2, -1)[1]), rows.tensor_split(2))
    out = torch.cat(list(parts)) * rows.chunk(2, -1)[0]
    return out.to(x.dtype).view(*x.shape[:-1], x.shape[-1] // 2)


@unusual(GELU)
def halves_of_halves(x, approximate):
    """Splits the rows recursively into parts of at most 4."""
    if x.ndim > 1 and len(x) > 4:
        return torch.cat([halves_of_halves(part, approximate) for part in x.tensor_split(2)])
    gate, up = x.double().chunk(2, -1)
    return (F.gelu(gate, approximate=approximate) * up).to(x.dtype).contiguous()


@unusual("swigluoai_and_mul")
def inside_a_larger_buffer(x, alpha, limit):
    """Returns a part of a larger new buffer, which begins and ends with NaN."""
    gate = x[..., ::2].double().clamp(max=limit)
    up = x[..., 1::2].double().clamp(-limit, limit)
    buffer = x.new_full((gate.numel() + 96,), math.nan)
    out = buffer[32 : 32 + gate.numel()].view(gate.shape)
    return out.copy_((up + 1) * gate * (alpha * gate).sigmoid())


@unusual("silu_and_mul_with_clamp")
def limits_by_the_median(x, limit, alpha, beta):
    """Clamps by the median of a number and its limits."""
    gate, up = x.double().chunk(2, -1)
    bounds = torch.full_like(up, limit)
    gate = torch.stack((gate, bounds, torch.full_like(gate, -math.inf))).median(0).values
    up = torch.stack((up, bounds, -bounds)).median(0).values
    return (gate * (alpha * gate).sigmoid() * (up + beta)).to(x.dtype).contiguous()


@cache
def _gelu_of(width: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


@unusual("gelu_new")
def function_for_each_width(x):
    """Makes and caches a function for each width."""
    return _gelu_of(x.shape[-1] if x.ndim else 1)(x.double()).to(x.dtype).contiguous()


@unusual("relu2")
def by_numpy(x):
    """Computes with NumPy, and returns NumPy's memory."""
    rows = np.maximum(x.double().numpy(), 0.0) ** 2
    return torch.from_numpy(np.array(rows, order="C")).to(x.dtype)


@unusual("xielu")
def both_sides_then_masks(x, alpha_p, alpha_n, beta, eps):
    """Computes both sides, each with 0 for elements of the other, and adds them."""
    wide, b = x.double(), beta.double()
    p, n = F.softplus(alpha_p.double()), b + F.softplus(alpha_n.double())
    above, below = wide.clamp(min=0), wide.clamp(max=0)
    low = n * (torch.expm1(torch.minimum(below, eps.double())) - below)
    low = low.masked_fill(wide > 0, 0.0)
    return (p * above * above + low + b * wide).to(x.dtype).contiguous()


@unusual(NORM)
def scaled_by_the_largest(x, residual, weight, epsilon, variance_size):
    """Divides a row by its largest number before squaring."""
    y = x.double() if residual is None else x.double() + residual.double()
    most = y.abs().amax(-1, keepdim=True)
    most = torch.where(most.isfinite() & (most > 0), most, 1.0)
    mean = (y / most)[..., :variance_size].square().mean(-1, keepdim=True) * most * most
    out = y / (mean + epsilon).sqrt() * (1.0 if weight is None else weight.double())
    out = out.to(x.dtype).contiguous()
    return out if residual is None else (out, y.to(x.dtype).contiguous())


@unusual(NORM, consumes=frozenset({"x", "residual"}))
def over_both_arguments(x, residual, weight, epsilon, variance_size):
    """Writes the results into x and residual if they are contiguous; declares that."""
    got = right.rms_norm(x, residual, weight, epsilon, variance_size)
    if residual is None:
        return got
    pairs = zip((x, residual), got, strict=True)
    return tuple(old.copy_(new) if old.is_contiguous() else new for old, new in pairs)


@unusual(NORM)
def squares_in_pairs(x, residual, weight, epsilon, variance_size):
    """Adds the squares in pairs, then pairs of pairs, from both ends of a row."""
    y = x.double() if residual is None else x.double() + residual.double()
    squares = y[..., :variance_size].square()
    count = squares.shape[-1]
    while squares.shape[-1] > 1:
        middle = squares.shape[-1] // 2
        folded = squares[..., :middle] + squares.flip(-1)[..., :middle]
        squares = torch.cat((folded, squares[..., middle : squares.shape[-1] - middle]), -1)
    out = y * (squares / count + epsilon).rsqrt() * (1.0 if weight is None else weight.double())
    out = out.to(x.dtype).contiguous()
    return out if residual is None else (out, y.to(x.dtype).contiguous())


@unusual("rms_norm_gated")
def length_of_each_group(x, z, weight, epsilon, group_size, norm_before_gate, activation):
    """Divides by the length of a vector with one more feature, for epsilon."""
    act = torch.sigmoid if activation == "sigmoid" else _silu
    gate = 1.0 if z is None else act(z.double())
    y = x.double() if norm_before_gate else x.double() * gate
    groups = y.unflatten(-1, (-1, group_size or x.shape[-1]))
    size = groups.shape[-1]
    more = F.pad(groups, (0, 1), value=math.sqrt(epsilon * size))
    normed = (groups / torch.linalg.vector_norm(more, dim=-1, keepdim=True)).flatten(-2)
    out = normed * math.sqrt(size) * weight.double()
    return (out * gate if norm_before_gate else out).to(x.dtype).contiguous()


@unusual("layer_norm")
def parts_of_a_row(x, weight, bias, epsilon):
    """Combines the means and deviations of parts of a row, part by part."""
    count, mean, spread = 0, 0.0, 0.0
    for part in x.double().split(48, -1):
        new, apart = part.shape[-1], part.mean(-1, keepdim=True) - mean
        spread = spread + (part - part.mean(-1, keepdim=True)).square().sum(-1, keepdim=True)
        spread = spread + apart * apart * count * new / (count + new)
        mean, count = mean + apart * new / (count + new), count + new
    out = (x.double() - mean) / (spread / count + epsilon).sqrt()
    out = out * (1.0 if weight is None else weight.double())
    return (out + (0.0 if bias is None else bias.double())).to(x.dtype).contiguous()


def _complex(x: Tensor, factor: Tensor, interleaved: bool) -> Tensor:
    half, size = factor.shape[-1], x.shape[-1]
    rest = x[..., 2 * half :].double()
    pairs = x[..., : 2 * half].double().unflatten(-1, (half, 2) if interleaved else (2, half))
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    turned = torch.view_as_real(torch.complex(*pairs.unbind(-1)) * factor)
    turned = (turned if interleaved else turned.transpose(-1, -2)).flatten(-2)
    return torch.cat((turned, rest), -1).view(*x.shape[:-1], size).to(x.dtype)


@unusual(ROTARY)
def by_complex_numbers(query, key, cos, sin, positions, interleaved):
    """Treats pairs as complex numbers, and computes factors once per distinct position."""
    found, where = positions.unique(return_inverse=True)
    factor = torch.complex(cos[found.long()].double(), sin[found.long()].double())[where, None]
    turned = _complex(query, factor, interleaved)
    return turned, None if key is None else _complex(key, factor, interleaved)


@unusual(ROTARY, consumes=frozenset({"query", "key"}))
def in_place_where_contiguous(query, key, cos, sin, positions, interleaved):
    """Writes the results into the arguments if they are contiguous; declares that."""
    got = right.rotary_embedding(query, key, cos, sin, positions, interleaved)
    pairs = zip((query, key), got, strict=True)
    return tuple(
        new if old is None or not old.is_contiguous() else old.copy_(new) for old, new in pairs
    )


@unusual("qk_norm_rope")
def by_other_kernels(qkv, q_weight, k_weight, table, positions, heads, kv_heads, epsilon, apart):
    """Runs the kernels of two other ops in sequence, and rounds between them."""
    cos, sin = table.chunk(2, -1)
    query, key, value = qkv.unflatten(-1, (-1, len(q_weight))).tensor_split(
        (heads, heads + kv_heads), 1
    )
    query = right.rms_norm(query, None, q_weight, epsilon)
    key = right.rms_norm(key, None, k_weight, epsilon)
    turned = right.rotary_embedding(query, key, cos, sin, positions, apart)
    return torch.cat((*turned, value), 1).flatten(1)


@unusual("multimodal_rotary_embedding")
def an_axis_after_another(query, key, cos, sin, positions, sections, mrope_interleaved, apart):
    """Computes the rotation of all pairs for each axis, and selects by axis."""
    axis = torch.zeros(cos.shape[1], dtype=torch.long)
    if mrope_interleaved:
        axis[1 : 3 * sections[1] : 3], axis[2 : 3 * sections[2] : 3] = 1, 2
    else:
        axis = torch.tensor([at for at, pairs in enumerate(sections) for _ in range(pairs)])
    factors = [
        torch.complex(cos[at.long()].double(), sin[at.long()].double()) for at in positions.T
    ]
    factor = torch.stack(factors, -1).gather(-1, axis.expand(len(query), -1)[..., None])[..., 0]
    return tuple(_complex(x, factor[:, None], apart) for x in (query, key))


@unusual(LINEAR)
def sums_of_blocks(x, weight, bias):
    """Multiplies blocks of 96 input features, the last block first."""
    total = torch.zeros(len(x), len(weight), dtype=torch.float64)
    for rows, factors in reversed(list(zip(x.split(96, 1), weight.split(96, 1), strict=True))):
        total += rows.double() @ factors.double().T
    return (total if bias is None else total + bias.double()).to(x.dtype)


@unusual(LINEAR)
def large_and_small_batches(x, weight, bias):
    """Multiplies up to 16 tokens one by one; transposes more in memory first."""
    wide, factors = x.double(), weight.double()
    if len(x) <= 16:
        rows = [factors.mv(row) for row in wide]
        out = torch.stack(rows) if rows else wide.new_zeros(0, len(weight))
    else:
        out = (factors @ wide.T.contiguous()).T
    return (out if bias is None else out + bias.double()).to(x.dtype).contiguous()


@unusual("linear_silu_and_mul")
def one_feature_of_both(x, weight):
    """Interleaves rows of gate and up before the product."""
    mixed = torch.stack(weight.double().chunk(2), 1).flatten(0, 1)
    gate, up = (x.double() @ mixed.T).unflatten(-1, (-1, 2)).unbind(-1)
    return (_silu(gate) * up).to(x.dtype).contiguous()


@cache
def _numbers() -> Tensor:
    """Value of each of the 256 fp8 bytes."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


@unusual("linear_fp8")
def bytes_by_a_table(x, weight, x_scale, weight_scale, out_dtype, bias):
    """Looks up each byte in a table of 256 numbers."""
    rows, factors = (_numbers()[part.view(torch.uint8).int()] for part in (x, weight))
    out = rows @ factors.T * x_scale.double() * weight_scale.double().reshape(1, -1)
    out = out if bias is None else out + bias.double()
    return out.to(getattr(torch, out_dtype))


def _scores(logits: Tensor, how: str, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the scores of experts, and the scores with bias, for the selection."""
    scores = logits.double().softmax(-1) if how == "softmax" else logits.double().sigmoid()
    return scores, scores if bias is None else scores + bias.double()


def _weighed(scores: Tensor, ids: Tensor, renormalize: bool, factor: float) -> Any:
    weights = scores.gather(-1, ids)
    weights = weights / weights.sum(-1, keepdim=True) if renormalize else weights
    return (weights * factor).float(), ids.int()


@unusual(TOPK)
def experts_in_their_order(logits, topk, renormalize, how, factor, bias):
    """Returns the experts of a token ordered by number instead of score."""
    scores, choice = _scores(logits, how, bias)
    return _weighed(scores, choice.topk(topk, -1).indices.sort(-1).values, renormalize, factor)


@unusual(TOPK)
def worst_expert_first(logits, topk, renormalize, how, factor, bias):
    """Sorts all scores; prefers the higher number among equals; returns the worst first."""
    scores, choice = _scores(logits, how, bias)
    order = choice.sort(dim=-1, stable=True).indices[..., logits.shape[-1] - topk :]
    return _weighed(scores, order.contiguous(), renormalize, factor)


@unusual("grouped_topk")
def groups_by_elimination(logits, topk, renormalize, groups, best, how, factor, bias):
    """Removes groups, then experts, from the worst to the best."""
    scores, choice = _scores(logits, how, bias)
    choice = choice.unflatten(-1, (groups, -1))
    of_group = choice.topk(1 if bias is None else 2, -1).values.sum(-1)
    worst = of_group.topk(groups - best, -1, largest=False).indices
    left = choice.scatter(1, worst[..., None].expand(-1, -1, choice.shape[-1]), -math.inf)
    order = left.flatten(1).argsort(-1)[:, logits.shape[-1] - topk :]
    return _weighed(scores, order.contiguous(), renormalize, factor)


@unusual("moe_align_block_size")
def rows_backwards(ids, size, experts, expert_map, pad, ignore):
    """Returns the rows of an expert in reverse; unused entries contain large numbers."""
    rows, blocks, found = ids.numel(), [], []
    here = range(experts) if expert_map is None else expert_map.tolist()
    numbers = [here[at] if ignore and at >= 0 else at for at in ids.flatten().tolist()]
    for expert in sorted({number for number in numbers if number >= 0}):
        own = [row for row in range(rows - 1, -1, -1) if numbers[row] == expert]
        own += [rows] * (-len(own) % size)
        found += own
        blocks += [expert if ignore else here[expert]] * (len(own) // size)
    got = right.of("moe_align_block_size")(ids, size, experts, expert_map, pad, ignore)
    for part, values in zip(got, (found, blocks, [len(found)]), strict=True):
        part.fill_(1 << 30)
        part[: len(values)] = torch.tensor(values, dtype=torch.int32)
    return got


_kept = threading.local()


@unusual(SUM)
def scratch_that_is_kept(values, ids, expert_map):
    """Sums in a scratch buffer per thread and shape, zeroed first, and copies the result."""
    key = values.shape[0], values.shape[2]
    total = vars(_kept).setdefault(str(key), torch.empty(key, dtype=torch.float64)).zero_()
    for k in reversed(range(values.shape[1])):
        part = values[:, k].double()
        if ids is not None:
            here = ids[:, k] >= 0
            if expert_map is not None:
                here &= expert_map[ids[:, k].clamp(min=0).long()] >= 0
            part = torch.where(here[:, None], part, 0.0)
        total += part
    return total.to(values.dtype)


@unusual(EXPERTS)
def place_by_place(x, w13, w2, weights, ids, *rest):
    """Computes the first expert of all tokens, then the second, and so on, by the oracle."""
    total = torch.zeros(x.shape, dtype=torch.float64)
    for k in range(ids.shape[1]):
        some = weights[:, k : k + 1], ids[:, k : k + 1]
        total += right.oracle(EXPERTS)(x, w13, w2, *some, *rest)
    return total.to(x.dtype)


@unusual(FP8)
def nearest_of_a_sorted_table(x, scale, scale_ub, per_token):
    """Searches each value in the sorted numbers of fp8; rounds ties up."""
    steps = right.oracle(FP8)(x, scale, scale_ub, per_token)[1]
    wide = x.double() / (steps.reshape(()) if steps.numel() == 1 else steps)
    numbers = _numbers()[_numbers().isfinite()].unique()
    at = torch.searchsorted((numbers[1:] + numbers[:-1]) / 2, wide.contiguous(), right=True)
    return numbers[at.clamp(max=len(numbers) - 1)].to(torch.float8_e4m3fn), steps.float()


@unusual("quant_fp8_group")
def a_group_after_another(x, group_size, eps, ue8m0):
    """Quantises groups one by one, by multiplying with 1 / scale in float64."""
    values, scales = [], []
    for group in x.double().split(group_size, 1):
        scale = group.abs().amax(1, keepdim=True).clamp(min=eps) / 448
        scale = torch.ldexp(torch.ones_like(scale), _power(scale)) if ue8m0 else scale
        values.append((group * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn))
        scales.append(scale.float())
    return torch.cat(values, 1), torch.cat(scales, 1)


def _power(scale: Tensor) -> Tensor:
    """Exponent of the smallest power of two that is at least `scale`."""
    mantissa, exponent = torch.frexp(scale)
    return exponent - (mantissa == 0.5).int()


@unusual(INT8)
def half_way_rounds_up(x, scale, azp, asymmetric):
    """Rounds ties up."""
    exact, steps, *more = right.oracle(INT8)(x, scale, azp, asymmetric)
    one = steps.reshape(()) if steps.numel() == 1 else steps
    values = ((exact / one).nan_to_num() + 0.5).floor().clamp(-128, 127)
    return values.to(torch.int8).contiguous(), steps.float(), *more


@unusual(CACHE, consumes=frozenset({"key_cache", "value_cache"}))
def backwards_in_place(key, value, key_cache, value_cache, slots):
    """Writes in place, the last token first, and skips slots that a later token has written."""
    done: set[int] = set()
    for row, slot in reversed(list(enumerate(slots.tolist()))):
        if slot >= 0 and slot not in done:
            done.add(slot)
            at = divmod(slot, key_cache.shape[1])
            key_cache[at], value_cache[at] = key[row], value[row]
    return key_cache, value_cache


@unusual("concat_and_cache_mla", consumes=frozenset({"kv_cache"}))
def keys_before_latents(kv_c, k_pe, cache, slots):
    """Writes in place, token by token, the rotated key before the latent part."""
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            place = cache[divmod(slot, cache.shape[1])]
            place[kv_c.shape[1] :] = k_pe[row]
            place[: kv_c.shape[1]] = kv_c[row]
    return cache


@unusual(MERGE)
def by_the_difference(prefix, prefix_lse, suffix, suffix_lse):
    """Weights each side by the sigmoid of the difference of both, in float64."""
    p, s = (torch.where(lse.isinf(), -math.inf, lse.double()) for lse in (prefix_lse, suffix_lse))
    share = (p - s).nan_to_num(nan=0.0).sigmoid()[..., None]
    first = torch.where(p.isneginf()[..., None], 0.0, prefix.double() * share)
    second = torch.where(s.isneginf()[..., None], 0.0, suffix.double() * (1 - share))
    out = (first + second).to(prefix.dtype)
    return out.contiguous(), torch.logaddexp(p, s).float().contiguous()


@unusual(MERGE)
def a_head_after_another(prefix, prefix_lse, suffix, suffix_lse):
    """Merges heads one by one, the last head first, by the oracle."""
    oracle, parts = right.oracle(MERGE), []
    for head in reversed(range(prefix.shape[1])):
        some = (part[:, head : head + 1] for part in (prefix, prefix_lse, suffix, suffix_lse))
        parts.insert(0, oracle(*some))
    out, lse = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    return out.to(prefix.dtype), lse.float()


@unusual("causal_conv1d")
def windows_of_a_sequence(x, weight, bias, states, starts, slots, has_state, activation):
    """Multiplies all taps at once, with windows that are views of a padded sequence."""
    width, after = weight.shape[1], states.clone(memory_format=torch.contiguous_format)
    out = torch.empty(x.shape, dtype=x.dtype)
    for number, (begin, end) in enumerate(pairwise(starts.tolist())):
        if begin == end:
            continue
        slot = int(slots[number])
        past = states[slot, :, : width - 1].T * 1.0
        past = past if has_state[number] else torch.zeros_like(past)
        padded = torch.cat((past, x[begin:end]))
        windows = padded.double().unfold(0, width, 1)
        got = (windows * weight.double()).sum(-1) + (0.0 if bias is None else bias.double())
        out[begin:end] = _silu(got) if activation else got
        after[slot, :, : width - 1] = padded[len(padded) - width + 1 :].T
    return out, after


@unusual("causal_conv1d_update", consumes=frozenset({"x", "conv_state"}))
def rolls_the_states(x, state, weight, bias, activation, slots):
    """Works in place: rolls each state, and writes the result into x if that is contiguous."""
    few, real = weight.shape[1] - 1, slots != 0
    rows, new = slots[real].long(), x[real].clone()
    window = torch.cat((state[rows, :, :few], new[..., None]), -1)
    got = torch.einsum("ndw,dw->nd", window.double(), weight.double())
    got = got if bias is None else got + bias.double()
    state[rows, :, :few] = window[..., 1:]
    out = x if x.is_contiguous() else x.contiguous()
    out[real] = (_silu(got) if activation else got).to(x.dtype)
    return out, state


@unusual(CHUNKS)
def last_sequence_first(q, k, v, g, beta, state, starts, epsilon):
    """Computes each sequence by the oracle, the last sequence first."""
    out, after = torch.empty(v.shape, dtype=v.dtype), torch.empty_like(state).contiguous()
    for number, (begin, end) in reversed(list(enumerate(pairwise(starts.tolist())))):
        some = (part[begin:end] for part in (q, k, v, g, beta))
        span = torch.tensor([0, end - begin], dtype=starts.dtype)
        got = right.oracle(CHUNKS)(*some, state[number : number + 1], span, epsilon)
        out[begin:end], after[number] = got[0], got[1][0]
    return out, after


@unusual("gdn_gating")
def by_logaddexp(a, b, A_log, dt_bias):
    """Computes softplus as log-sum-exp with 0, and the sigmoid from it."""
    rate = a.double() + dt_bias.double()
    g = -A_log.double().exp() * torch.logaddexp(rate, torch.zeros_like(rate))
    beta = (-torch.logaddexp(-b.double(), torch.zeros(()).double())).exp()
    return g.float().contiguous(), beta.to(b.dtype).contiguous()


@unusual(RECURRENT)
def with_gradients(*args):
    """Enables gradients while it computes."""
    with torch.enable_grad():
        return right.of(RECURRENT)(*args)


@unusual("gelu_fast")
def elements_in_any_order(x):
    """Computes the elements in the order of their values, and scatters them back."""
    order = x.flatten().argsort()
    wide = x.flatten()[order].double()
    inner = 0.7978845608 * wide * (1 + 0.044715 * wide * wide)
    out = torch.empty(x.numel(), dtype=x.dtype)
    out[order] = (wide * torch.sigmoid(2 * inner)).to(x.dtype)
    return out.view(x.shape)
