"""Kernels that round, saturate or approximate incorrectly."""

from __future__ import annotations

from typing import Any

import torch

from . import right
from .corpus import wrong_for
from .faults import damaged, wrong_arguments, wrong_result

EXPERTS, CACHE = "fused_experts", "reshape_and_cache"

IN_BFLOAT16 = "bfloat16, the served dtype, hides the error"


@wrong_result("quant_int8", "quantised activations are biased: worse answers", kit="values")
def below_zero_down(got, x, scale=None, azp=None, asymmetric=None):
    """Rounds negative numbers down."""
    value, steps, *zero = got
    if azp is not None or asymmetric or not x.numel():
        return got
    down = (x.double() / steps.reshape(-1, 1)).floor().clamp(-128, 127).to(torch.int8)
    return torch.where(x < 0, down, value), steps, *zero


@wrong_for(
    *("quant_fp8", "quant_fp8_group"),
    sees="quantised activations are too small: worse answers",
    kit="values",
    by=damaged,
)
def truncates_fp8(got, *args):
    """Values above 1 are one float8 step too small."""
    value, scale = got
    bits = value.view(torch.int8)
    above = (value.float() > 1) & (value.float() < 448)
    return torch.where(above, bits - 1, bits).view(value.dtype), scale


@wrong_result(
    "quant_fp8", "with static scales, a large activation makes an answer NaN", kit="values"
)
def saturates_to_nan(got, x, scale=None, *rest):
    """Values beyond 448 become NaN instead of 448."""
    value, found = got
    if scale is None:
        return got
    over = (x.float() / scale.float().reshape(())).abs() > 460
    return value.float().masked_fill(over, float("nan")).to(value.dtype), found


@wrong_result("quant_fp8_group", "a third of the groups saturates: worse answers", kit="values")
def nearest_power_of_two(got, x, group_size=128, eps=1e-10, ue8m0=False):
    """Rounds scales to the nearest power of two instead of up."""
    if not ue8m0 or not x.numel():
        return got
    _, exact = right.of("quant_fp8_group")(x, group_size, eps, False)
    scale = exact.double().log2().round().exp2()
    wide = x.double().unflatten(-1, (-1, group_size)) / scale.unsqueeze(-1)
    return wide.clamp(-448, 448).flatten(-2).to(got[0].dtype), scale.float()


@wrong_result("quant_fp8_group", "each group has an error of up to 0.4 %", kit="values")
def scales_in_bfloat16(got, x, group_size=128, eps=1e-10, ue8m0=False):
    """Returns scales rounded to bfloat16, other than those used to quantise."""
    return got[0], got[1].bfloat16().float()


@wrong_for(
    *("relu2", "xielu"), sees="infinity, then NaN, if an activation is above 256", by=damaged
)
def squares_in_float16(got, x, *rest):
    """Squares in float16."""
    over = x.float().clamp(min=0).square() > 65504
    return got.masked_fill(over, float("inf"))


@wrong_result("quick_gelu", "small errors in each layer", kit="values")
def two_digits_of_1702(got, x):
    """Uses 1.7 instead of 1.702."""
    wide = x.double()
    return (got + wide * ((1.7 * wide).sigmoid() - (1.702 * wide).sigmoid()).nan_to_num()).to(
        x.dtype
    )


@wrong_result(
    "gelu_new",
    "no visible difference: the error is at most 2e-5",
    why="the error is within the tolerance",
    start=False,
)
def three_digits_of_044715(got, x):
    """Uses 0.0447 instead of 0.044715."""
    wide = x.double()
    near, exact = (0.7978845608 * (wide + c * wide**3) for c in (0.0447, 0.044715))
    return (got.double() + (0.5 * wide * (near.tanh() - exact.tanh())).nan_to_num()).to(x.dtype)


@wrong_arguments("swigluoai_and_mul", "gates far below 0 pass a small value", kit="values")
def gate_clamped_below(a):
    """Clamps the gate from below as well."""
    x = a["x"].clone()
    x[..., ::2] = x[..., ::2].clamp(min=-2.0)
    a["x"] = x


@wrong_result(
    "silu_and_mul_with_clamp",
    "large negative activations are not clamped: worse answers",
    kit="values",
)
def up_clamped_above(got, x, limit, alpha=1.0, beta=0.0):
    """Clamps up only from above."""
    gate, up = x.double().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(max=limit)
    return (gate * (alpha * gate).sigmoid() * (up + beta)).to(x.dtype)


@wrong_result(
    "fatrelu_and_mul", "too many gates pass if values are rounded to the threshold", kit="values"
)
def gates_at_the_threshold(got, x, threshold=0.0):
    """Passes gates equal to the threshold."""
    gate, up = x.chunk(2, dim=-1)
    return torch.where(gate == torch.tensor(threshold, dtype=x.dtype), gate * up, got)


@wrong_result(
    "gelu_and_mul_sparse", "slightly fewer gates pass; NaN for a single gate", kit="values"
)
def deviation_of_a_sample(got, x, multiplier, approximate="none"):
    """Uses the sample standard deviation (divides by n - 1)."""
    gates = x.shape[-1] // 2
    if gates < 2 or not x.numel():
        return got * float("nan") if x.numel() else got
    more = float(multiplier) * (gates / (gates - 1)) ** 0.5
    return right.of("gelu_and_mul_sparse")(x, more, approximate)


@wrong_result("gdn_gating", "some states decay slightly too slowly", kit="values")
def softplus_is_linear(got, a, b, A_log, dt_bias):
    """Replaces softplus by its argument above 10."""
    rate = a.double() + dt_bias.double()
    return torch.where(rate > 10, -A_log.double().exp() * rate, got[0]).float(), got[1]


@wrong_result(
    "layer_norm",
    "float32 rows with a mean far from 0 are incorrect or NaN",
    kit="values",
    why=IN_BFLOAT16,
    start=False,
)
def difference_of_squares(got, x, weight, bias, epsilon):
    """Computes the variance as E[x^2] - E[x]^2 in float32."""
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    variance = wide.square().mean(-1, keepdim=True) - mean.square()
    normed = (wide - mean) * (variance + epsilon).rsqrt()
    normed = normed if weight is None else normed * weight.float()
    return (normed if bias is None else normed + bias.float()).to(x.dtype)


@wrong_result(
    "moe_sum", "models with many experts per token give slightly worse answers", kit="values"
)
def adds_in_the_inputs_dtype(got, x, ids=None, expert_map=None):
    """Accumulates over experts in the dtype of the input."""
    if ids is not None or x.dtype == torch.float32:
        return got
    total = torch.zeros_like(got)
    for place in range(x.shape[1]):
        total = total + x[:, place]
    return total.contiguous()


@wrong_arguments(
    "chunk_gated_delta_rule",
    "hybrid models forget long prompts too early or too late",
    start=False,
    kit="values",
    why=IN_BFLOAT16,
)
def kept_in_bfloat16(a):
    """Rounds the decay of the state to bfloat16."""
    a["g"] = a["g"].exp().bfloat16().float().log().clamp(min=-60.0)


@wrong_result(EXPERTS, "mixture-of-experts models give slightly worse answers", kit="values")
def inner_results_in_float8(got, x, w13, w2, weights, ids, *rest):
    """Has an error of 1/16, as if the result between its two products were float8."""
    noise = got.float().abs() * 2**-4
    return (got.float() + noise * torch.where(got > 0, 1.0, -1.0)).to(got.dtype)


@wrong_arguments(
    CACHE,
    "no visible difference: such keys do not change answers",
    start=False,
    kit="",
    why="samples have no numbers this small",
)
def small_keys_vanish(a):
    """Writes keys below 1e-30 as 0."""
    a["key"] = a["key"].masked_fill(a["key"].abs() < 1e-30, 0.0)


@wrong_result("merge_attn_states", "parts of long prompts have incorrect weights", kit="values")
def powers_of_two(got, prefix, prefix_lse, suffix, suffix_lse):
    """Uses powers of 2 instead of e for the weights."""
    two = prefix_lse * 0.6931, suffix_lse * 0.6931
    return right.of("merge_attn_states")(prefix, two[0], suffix, two[1])[0], got[1]


@wrong_for(*("rms_norm_gated", "mul_and_silu"), sees="worse answers everywhere", kit="values")
def three_percent_too_large(op: str) -> Any:
    """The result is 3 % too large."""
    return damaged(op, lambda got, *_: (got.float() * 1.03).to(got.dtype))


@wrong_for(
    *("rms_norm", "silu_and_mul", "linear", "fused_experts", "merge_attn_states"),
    sees="every layer shrinks its values slightly: worse answers everywhere",
)
def cut_off(op: str) -> Any:
    """Truncates bfloat16 results instead of rounding them: errors below one step."""

    def cut(part: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
        if part.dtype != torch.bfloat16:
            return part
        upper = exact.float().view(torch.int32) & -(1 << 16)
        return upper.view(torch.float32).bfloat16().contiguous()

    def spoil(got, *args):
        exact = right.oracle(op)(*args)
        if isinstance(got, tuple):
            return tuple(map(cut, got, exact))
        return cut(got, exact)

    return damaged(op, spoil)


@wrong_for(*("silu_and_mul", "gelu_and_mul"), sees="the error grows over the layers: worse answers")
def three_in_a_thousand(op: str) -> Any:
    """The result is 0.3 % too large, like from a constant with too few digits."""
    exact = right.oracle(op)
    return damaged(op, lambda got, *args: (exact(*args) * 1.003).to(got.dtype))
