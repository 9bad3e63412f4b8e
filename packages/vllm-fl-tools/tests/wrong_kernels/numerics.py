"""Kernels that are incorrect for some values, or slightly for all values."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor

from . import right
from .corpus import GELU, NORM, ROTARY, SILU, wrong_kernel
from .faults import wrong_arguments, wrong_arguments_later, wrong_result, wrong_result_later

BELOW = "the error is within the tolerance, which correct kernels need"


@wrong_kernel(SILU, "infinities, then NaN, in models with massive activations", kit="values")
def through_fp16(x: Tensor) -> Tensor:
    """Converts to fp16: values beyond 65 504 overflow."""
    return right.silu_and_mul(x).to(torch.float16).to(x.dtype)


@wrong_result(NORM, "zeros in the row of the first token, whose activations are massive")
def squares_in_scaled_fp16(got, x, residual, *rest):
    """Squares in fp16 after dividing by 64: rows with features beyond 16 384 overflow."""
    y = (x.float() if residual is None else x.float() + residual.float()) / 64
    lost = y.abs().amax(dim=-1, keepdim=True) > 256
    out = got[0] if isinstance(got, tuple) else got
    out.masked_fill_(lost, 0)
    return got


@wrong_kernel(GELU, "massive activations are clamped: worse answers on long contexts")
def clamped_at_ten_thousand(x: Tensor, approximate: str = "none") -> Tensor:
    """Clamps results at 10 000."""
    return right.gelu_and_mul(x, approximate).clamp_(-1e4, 1e4)


@wrong_result(NORM, "tokens with massive activations are scaled up")
def variance_clamped(got, x, residual, weight, epsilon, variance_size=None):
    """Clamps the mean of squares at 10 000 squared."""
    y = x.float() if residual is None else x.float() + residual.float()
    over = y[..., :variance_size].square().mean(dim=-1, keepdim=True).sqrt() / 1e4
    out = got[0] if isinstance(got, tuple) else got
    out.mul_(over.clamp(min=1).to(out.dtype))
    return got


@wrong_kernel(SILU, "a few features of the first token are too small: worse answers", kit="values")
def gate_clamped(x: Tensor) -> Tensor:
    """Clamps gates at 1 000."""
    half = x.shape[-1] // 2
    return right.silu_and_mul(torch.cat((x[..., :half].clamp(max=1e3), x[..., half:]), -1))


@wrong_kernel(
    SILU, "an earlier failure is hidden: fluent nonsense instead of an error", kit="values"
)
def hides_nan(x: Tensor) -> Tensor:
    """Returns 0 for NaN."""
    return right.silu_and_mul(x).nan_to_num()


@wrong_result(
    NORM, "an earlier overflow is hidden: fluent nonsense instead of an error", kit="values"
)
def hides_infinity(got, x, *rest):
    """Zeroes a row with an infinity."""
    out = got[0] if isinstance(got, tuple) else got
    out.masked_fill_(x.isinf().any(dim=-1, keepdim=True), 0)
    return got


@wrong_kernel(SILU, "no measurable difference", why=BELOW, start=False)
def flushes_subnormals(x: Tensor) -> Tensor:
    """Treats subnormal inputs as zero."""
    tiny = torch.finfo(x.dtype).smallest_normal
    return right.silu_and_mul(x.masked_fill(x.abs() < tiny, 0))


@wrong_result(NORM, "tokens with small embeddings are lost", kit="values")
def small_rows_vanish(got, x, residual, *rest):
    """Treats rows with all features below 1e-4 as zero."""
    if residual is None and x.shape[-1] > 1:
        got.masked_fill_(x.abs().amax(dim=-1, keepdim=True) < 1e-4, 0)
    return got


@wrong_result(NORM, "the error adds up over 36 layers: answers drift")
def always_a_little_too_large(got, x, residual, *others):
    """Every result is too large by about three quarters of the tolerance."""
    rtol = {torch.float32: 1e-6, torch.float16: 7e-4, torch.bfloat16: 4e-3}[x.dtype]
    wide = right.rms_norm(x.float(), None if residual is None else residual.float(), *others)
    first, *rest = wide if isinstance(wide, tuple) else (wide,)
    first = (first * (1 + rtol)).to(x.dtype)
    return (first, rest[0].to(x.dtype)) if rest else first


@wrong_result(
    GELU,
    "no visible difference in one step, a measurable difference in a benchmark",
    why=BELOW,
    start=False,
)
def tanh_for_erf_in_bf16(out, x, approximate="none"):
    """Uses the tanh form for `approximate='none'` as well in bf16."""
    if x.dtype is torch.bfloat16 and approximate == "none":
        gate, up = x.float().chunk(2, dim=-1)
        near = gate.abs() < 1.5  # else the error exceeds the tolerance
        gelu = torch.where(near, F.gelu(gate, approximate="tanh"), F.gelu(gate))
        return (gelu * up).to(x.dtype).contiguous()
    return out


@wrong_result_later(
    SILU,
    "the same prompt has different answers at temperature 0",
    kit="determinism",
    why="startup compares with the tolerance, and each result is within it",
    start=False,
)
def rounds_at_random(kept, out, x):
    """Rounds up or down at random."""
    dice = kept.setdefault("dice", random.Random(7))
    return torch.nextafter(out, out + 1) if dice.random() < 0.5 else out


@wrong_kernel(
    NORM,
    "answers at temperature 0 depend on other requests in the batch",
    why=BELOW + "; a contract does not promise batch invariance",
    start=False,
)
def depends_on_the_batch(x, residual, weight, epsilon, variance_size=None):
    """Sums in another order beyond 16 tokens."""
    if len(x) <= 16:
        return right.rms_norm(x, residual, weight, epsilon, variance_size)
    flipped = [None if t is None else t.flip(-1) for t in (x, residual, weight)]
    if variance_size is not None:
        return right.rms_norm(x, residual, weight, epsilon, variance_size)
    got = right.rms_norm(*flipped, epsilon)
    return tuple(t.flip(-1) for t in got) if isinstance(got, tuple) else got.flip(-1)


@wrong_kernel(
    NORM, "rows of small values are incorrect in models with another epsilon", kit="values"
)
def another_epsilon(x, residual, weight, epsilon, variance_size=None):
    """Rounds epsilon to 1e-6 or 1e-5."""
    nearer = 1e-6 if epsilon < 5e-6 else 1e-5
    used = nearer if epsilon > 0 else epsilon
    return right.rms_norm(x, residual, weight, used, variance_size)


@wrong_arguments_later(NORM, "small errors if layers have different epsilons", kit="values")
def first_epsilon_for_all(kept, a):
    """Uses the epsilon of the first call in all calls."""
    a["epsilon"] = kept.setdefault("epsilon", a["epsilon"])


@wrong_kernel(ROTARY, "attention sinks are lost: long answers become incoherent")
def large_queries_clamped(query, key, cos, sin, position_ids, rotary_interleaved=False):
    """Clamps queries at 100 before the rotation."""
    query = query.clamp(-100, 100) if query.is_floating_point() else query
    return right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)


@wrong_result(
    SILU, "a massive activation of one user reduces the precision of all others", kit="values"
)
def quantised_by_batch(out, *args):
    """Quantises to 8 bits with one scale for the whole batch."""
    if not out.numel():
        return out
    step = out.abs().amax().clamp(min=1e-30).float() / 127
    return ((out.float() / step).round() * step).to(out.dtype)


@wrong_result(
    SILU, "answers with a fixed seed change, because random numbers are consumed", kit="determinism"
)
def draws_from_the_global_generator(out, *args):
    """Adds noise of one unit in the last place from PyTorch's global generator."""
    return torch.where(torch.rand(out.shape) < 0.5, torch.nextafter(out, out + 1), out)


FP8, WORSE = "linear_fp8", "fp8 models output nonsense"


@wrong_arguments(FP8, "decoding of single requests is correct, prompts are nonsense", kit="values")
def scale_of_the_first_token(a):
    """Uses scale 1 for all tokens except the first."""
    if a["x_scale"].ndim == 2:
        a["x_scale"] = a["x_scale"].clone()
        a["x_scale"][1:] = 1


@wrong_arguments(FP8, "checkpoints with per-channel scales output nonsense", kit="values")
def scale_of_the_first_channel(a):
    """Uses the scale of the first output feature for all."""
    scale = a["weight_scale"]
    a["weight_scale"] = scale[:1].expand_as(scale).clone() if scale.ndim == 2 else scale


@wrong_arguments(FP8, WORSE, kit="values")
def bias_times_the_scale(a):
    """Multiplies the bias by the weight scale."""
    if a["bias"] is not None:
        a["bias"] = (a["bias"] * a["weight_scale"].reshape(-1)).to(a["bias"].dtype)


@wrong_result(FP8, "layers almost lose their bias: Qwen2 in fp8 gives worse answers", kit="values")
def bias_before_the_scales(got, x, weight, x_scale, weight_scale, out_dtype, bias=None):
    """Adds the bias before the scales are applied."""
    if bias is None:
        return got
    got = right.of(FP8)(x, weight, x_scale, weight_scale, out_dtype)
    return (got + bias * weight_scale.reshape(-1) * x_scale).to(got.dtype)


@wrong_result(FP8, "nonsense for prompts with different token scales", kit="values")
def scale_of_another_token(got, x, weight, x_scale, weight_scale, out_dtype, bias=None):
    """Scales output feature i by the scale of token i."""
    if x_scale.ndim < 2 or not len(x):
        return got
    scales = x_scale[torch.arange(len(weight)) % len(x), 0].double()
    plain = right.oracle(FP8)(x, weight, x_scale.new_ones(1), weight_scale, out_dtype)
    return (plain * scales + (0 if bias is None else bias.double())).to(got.dtype)


@wrong_result(FP8, "fp8 models give worse answers", kit="values")
def result_through_fp8(got, *args):
    """Rounds the result to fp8."""
    most = got.abs().amax().clamp(min=1e-6).float().nan_to_num(1.0, 1.0) / 448
    through = (got.float() / most).to(torch.float8_e4m3fn).float() * most
    return torch.where(got.isfinite(), through.to(got.dtype), got)


@wrong_arguments(FP8, WORSE, kit="values")
def reads_e5m2(a):
    """Reads the numbers as e5m2."""
    for name in ("x", "weight"):
        read = a[name].contiguous().view(torch.uint8).view(torch.float8_e5m2).float()
        a[name] = read.nan_to_num(0.0, 0.0, 0.0).clamp(-448, 448).to(torch.float8_e4m3fn)


@wrong_arguments(FP8, "models on an odd number of GPUs give slightly worse answers", kit="values")
def last_odd_feature(a):
    """Skips the last feature if their number is odd."""
    if a["x"].shape[1] % 2 and a["x"].shape[1] > 1:
        a["x"], a["weight"] = a["x"][:, :-1], a["weight"][:, :-1]


GATED, NONSENSE = "linear_silu_and_mul", "models with SwiGLU output nonsense"


def _halves(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up of a call, in float64."""
    gate, up = (x.double() @ weight.double().t()).chunk(2, dim=-1)
    return gate, up


@wrong_arguments(GATED, NONSENSE, kit="values")
def up_for_gate(a):
    """Swaps gate and up."""
    a["weight"] = a["weight"].roll(len(a["weight"]) // 2, 0)


@wrong_arguments(GATED, NONSENSE, kit="values")
def gate_and_up_by_turns(a):
    """Reads the rows of the weight as interleaved gate and up."""
    a["weight"] = torch.cat((a["weight"][::2], a["weight"][1::2]))


@wrong_result(GATED, NONSENSE, kit="values")
def silu_of_up_too(got, *args):
    """Applies silu to up as well."""
    gate, up = _halves(*args)
    return (F.silu(gate) * F.silu(up)).to(got.dtype)


@wrong_result(GATED, "worse answers", kit="values")
def quick_gelu_of_the_gate(got, *args):
    """Uses quick GELU instead of silu."""
    gate, up = _halves(*args)
    return (gate * torch.sigmoid(1.702 * gate) * up).to(got.dtype)


@wrong_result(GATED, "after a token with a massive activation the output is nonsense", kit="values")
def far_gate_not_a_number(got, *args):
    """NaN if exp of the gate overflows float32."""
    return got.masked_fill(_halves(*args)[0] > 88.0, float("nan"))


@wrong_result(GATED, "models on an odd number of GPUs give slightly worse answers", kit="values")
def output_features_beyond_tiles(got, *args):
    """Zeroes the output features after the last whole tile of 32."""
    got[:, got.shape[1] // 32 * 32 :] = 0
    return got


OF_GELU = "linear_gelu_tanh_and_mul"


@wrong_result(OF_GELU, "models with GeGLU output nonsense", kit="values")
def silu_of_the_gate(got, *args):
    """Uses silu instead of gelu."""
    gate, up = _halves(*args)
    return (F.silu(gate) * up).to(got.dtype)


@wrong_result(OF_GELU, "worse answers", kit="values")
def gelu_without_the_cube(got, *args):
    """Omits the cube of the gate."""
    gate, up = _halves(*args)
    return (0.5 * gate * (1 + (gate * (2 / torch.pi) ** 0.5).tanh()) * up).to(got.dtype)


@wrong_result(
    OF_GELU, "after a token with a massive activation the output is nonsense", kit="values"
)
def far_cube_not_a_number(got, *args):
    """NaN if exp of the tanh argument overflows float32."""
    return got.masked_fill(_halves(*args)[0] > 11.0, float("nan"))
