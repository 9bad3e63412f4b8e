"""Wrong for some values only, or a little everywhere."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_fl.plugins.registry import known_contracts

from . import right
from .corpus import GELU, MIXED, NORM, ROTARY, SILU, wrong, wrong_kernel
from .faults import changed, spoilt

BELOW = "the difference lies below the tolerance, which leaves room for honest kernels"


@wrong_kernel(
    SILU,
    "computes through fp16: what is beyond 65 504 overflows",
    "infinities, then NaN, in models with massive activations",
    kit="values",
)
def through_fp16(x: Tensor) -> Tensor:
    return right.silu_and_mul(x).to(torch.float16).to(x.dtype)


@wrong_kernel(
    NORM,
    "squares in fp16 after dividing by 64: rows with features beyond 16 384 overflow",
    "zeros in the rows of the first token, where activations are massive",
)
def squares_in_scaled_fp16(x, residual, weight, epsilon, variance_size=None):
    got = right.rms_norm(x, residual, weight, epsilon, variance_size)
    y = (x.float() if residual is None else x.float() + residual.float()) / 64
    lost = y.abs().amax(dim=-1, keepdim=True) > 256
    out = got[0] if isinstance(got, tuple) else got
    out.masked_fill_(lost, 0)
    return got


@wrong_kernel(
    GELU,
    "results are clamped at 10 000",
    "massive activations are cut: worse answers on long contexts",
)
def clamped_at_ten_thousand(x: Tensor, approximate: str = "none") -> Tensor:
    return right.gelu_and_mul(x, approximate).clamp_(-1e4, 1e4)


@wrong_kernel(
    NORM,
    "the mean of squares is clamped at 10 000 squared",
    "tokens with massive activations are scaled up",
)
def variance_clamped(x, residual, weight, epsilon, variance_size=None):
    got = right.rms_norm(x, residual, weight, epsilon, variance_size)
    y = x.float() if residual is None else x.float() + residual.float()
    over = y[..., :variance_size].square().mean(dim=-1, keepdim=True).sqrt() / 1e4
    out = got[0] if isinstance(got, tuple) else got
    out.mul_(over.clamp(min=1).to(out.dtype))
    return got


@wrong_kernel(
    SILU,
    "gates beyond 1 000 are taken as 1 000",
    "a few features of the first token are too small: worse answers",
    kit="values",
)
def gate_clamped(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return right.silu_and_mul(torch.cat((x[..., :half].clamp(max=1e3), x[..., half:]), -1))


@wrong_kernel(
    SILU,
    "NaN becomes 0",
    "what broke before it is hidden: fluent nonsense instead of an error",
    kit="values",
)
def hides_nan(x: Tensor) -> Tensor:
    return right.silu_and_mul(x).nan_to_num()


@wrong_kernel(
    NORM,
    "a row with an infinity becomes zeros",
    "an overflow before it is hidden: fluent nonsense instead of an error",
    kit="values",
)
def hides_infinity(x, residual, weight, epsilon, variance_size=None):
    got = right.rms_norm(x, residual, weight, epsilon, variance_size)
    out = got[0] if isinstance(got, tuple) else got
    out.masked_fill_(x.isinf().any(dim=-1, keepdim=True), 0)
    return got


@wrong_kernel(
    SILU, "subnormal inputs count as zero", "nothing that can be measured", why=BELOW, start=False
)
def flushes_subnormals(x: Tensor) -> Tensor:
    tiny = torch.finfo(x.dtype).smallest_normal
    return right.silu_and_mul(x.masked_fill(x.abs() < tiny, 0))


@wrong_kernel(
    NORM,
    "rows whose features are all below 1e-4 count as zeros",
    "tokens with small embeddings vanish",
    kit="values",
)
def small_rows_vanish(x, residual, weight, epsilon, variance_size=None):
    got = right.rms_norm(x, residual, weight, epsilon, variance_size)
    if residual is None and x.shape[-1] > 1:
        got.masked_fill_(x.abs().amax(dim=-1, keepdim=True) < 1e-4, 0)
    return got


@wrong(
    NORM,
    "every result is too large by three quarters of the tolerance",
    "36 layers add it up: answers drift, and no kernel is to blame",
)
def always_a_little_too_large() -> Any:
    rtol = {torch.float32: 1e-6, torch.float16: 7e-4, torch.bfloat16: 4e-3}

    def rms_norm(x, residual, weight, epsilon, variance_size=None):
        right.rms_norm(x, residual, weight, epsilon, variance_size)  # for bad inputs
        got = right.rms_norm(
            x.float(),
            None if residual is None else residual.float(),
            weight,
            epsilon,
            variance_size,
        )
        parts = got if isinstance(got, tuple) else (got,)
        first = (parts[0] * (1 + rtol[x.dtype])).to(x.dtype)
        return (first, parts[1].to(x.dtype)) if residual is not None else first

    return rms_norm


@wrong_kernel(
    GELU,
    "the tanh form for both words in bf16",
    "nothing that one step shows; measurably another model over a benchmark",
    why=BELOW,
    start=False,
)
def tanh_for_erf_in_bf16(x: Tensor, approximate: str = "none") -> Tensor:
    out = right.gelu_and_mul(x, approximate)
    if x.dtype is torch.bfloat16 and approximate == "none":
        gate, up = x.float().chunk(2, dim=-1)
        near = gate.abs() < 1.5  # beyond, the two differ by more than the tolerance
        gelu = torch.where(near, F.gelu(gate, approximate="tanh"), F.gelu(gate))
        return (gelu * up).to(x.dtype).contiguous()
    return out


@wrong(
    SILU,
    "rounds up or down at random",
    "the same prompt has other answers at temperature 0",
    kit="determinism",
    why="start compares with the tolerance only, and each result is within it",
    start=False,
)
def rounds_at_random() -> Any:
    dice = random.Random(7)

    def silu_and_mul(x: Tensor) -> Tensor:
        out = right.silu_and_mul(x)
        return torch.nextafter(out, out + 1) if dice.random() < 0.5 else out

    return silu_and_mul


@wrong_kernel(
    NORM,
    "adds up in another order when more than 16 tokens share the step",
    "the same prompt has other answers at temperature 0, depending on who else is served",
    why=BELOW + "; a contract promises no independence of the batch",
    start=False,
)
def depends_on_the_batch(x, residual, weight, epsilon, variance_size=None):
    if len(x) <= 16:
        return right.rms_norm(x, residual, weight, epsilon, variance_size)
    flipped = [None if t is None else t.flip(-1) for t in (x, residual, weight)]
    if variance_size is not None:
        return right.rms_norm(x, residual, weight, epsilon, variance_size)
    got = right.rms_norm(*flipped, epsilon)
    return tuple(t.flip(-1) for t in got) if isinstance(got, tuple) else got.flip(-1)


@wrong_kernel(
    NORM,
    "takes every epsilon for 1e-6 or 1e-5, whichever is nearer",
    "nothing with those two; small rows are wrong in a model that has another",
    kit="values",
)
def another_epsilon(x, residual, weight, epsilon, variance_size=None):
    nearer = 1e-6 if epsilon < 5e-6 else 1e-5
    used = nearer if epsilon > 0 else epsilon
    return right.rms_norm(x, residual, weight, used, variance_size)


@wrong(
    NORM,
    "the first epsilon that it sees holds for ever",
    "nothing, or noise: as the layers' order wills",
    kit="values",
)
def first_epsilon_for_all() -> Any:
    kept: list[float] = []

    def rms_norm(x, residual, weight, epsilon, variance_size=None):
        kept.append(epsilon)
        return right.rms_norm(x, residual, weight, kept[0], variance_size)

    return rms_norm


@wrong_kernel(
    ROTARY,
    "queries beyond 100 are clamped before they turn",
    "attention sinks disappear: long answers fall apart",
)
def large_queries_clamped(query, key, cos, sin, position_ids, rotary_interleaved=False):
    query = query.clamp(-100, 100) if query.is_floating_point() else query
    return right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)


@wrong_kernel(
    SILU,
    "quantises to 256 steps of the largest value of the whole batch",
    "one user's massive activation costs all others their precision",
    kit="values",
)
def quantised_by_batch(x: Tensor) -> Tensor:
    out = right.silu_and_mul(x)
    if not out.numel():
        return out
    step = out.abs().amax().clamp(min=1e-30).float() / 127
    return ((out.float() / step).round() * step).to(out.dtype)


@wrong_kernel(
    SILU,
    "adds noise of one unit in the last place from PyTorch's global generator",
    "with a seed set, answers are other ones; sampling is out of step",
    kit="determinism",
)
def draws_from_the_global_generator(x: Tensor) -> Tensor:
    out = right.silu_and_mul(x)
    return torch.where(torch.rand(out.shape) < 0.5, torch.nextafter(out, out + 1), out)


FP8, WORSE = "linear_fp8", "an fp8 model answers nonsense"


@wrong_kernel(
    FP8,
    "the scales of tokens beyond the first are taken for 1",
    "decoding alone is right, prompts are nonsense",
    kit="values",
    sizes=MIXED,
    by=changed,
)
def scale_of_the_first_token(a):
    if a["x_scale"].ndim == 2:
        a["x_scale"] = a["x_scale"].clone()
        a["x_scale"][1:] = 1


@wrong_kernel(
    FP8,
    "the scale of the first output feature is that of all",
    "checkpoints with scales for channels answer nonsense",
    kit="values",
    sizes=MIXED,
    by=changed,
)
def scale_of_the_first_channel(a):
    scale = a["weight_scale"]
    a["weight_scale"] = scale[:1].expand_as(scale).clone() if scale.ndim == 2 else scale


@wrong_kernel(
    FP8,
    "the bias is scaled, too",
    WORSE,
    kit="values",
    sizes=MIXED,
    by=changed,
)
def bias_times_the_scale(a):
    if a["bias"] is not None:
        a["bias"] = (a["bias"] * a["weight_scale"].reshape(-1)).to(a["bias"].dtype)


@wrong_kernel(
    FP8,
    "the bias is added to the sums before their scales",
    "layers with a bias lose it: Qwen2 in fp8 answers worse",
    kit="values",
    sizes=MIXED,
    by=spoilt,
)
def bias_before_the_scales(got, x, weight, x_scale, weight_scale, out_dtype, bias=None):
    if bias is None:
        return got
    got = right.of(FP8)(x, weight, x_scale, weight_scale, out_dtype)
    return (got + bias * weight_scale.reshape(-1) * x_scale).to(got.dtype)


@wrong_kernel(
    FP8,
    "each output feature is scaled by the scale of the token of its number",
    "prompts whose tokens differ in size answer nonsense",
    kit="values",
    sizes=MIXED,
    by=spoilt,
)
def scale_of_another_token(got, x, weight, x_scale, weight_scale, out_dtype, bias=None):
    if x_scale.ndim < 2 or not len(x):
        return got
    scales = x_scale[torch.arange(len(weight)) % len(x), 0].double()
    plain = (
        known_contracts()
        .contracts[FP8]
        .oracle(x, weight, x_scale.new_ones(1), weight_scale, out_dtype)
    )
    return (plain * scales + (0 if bias is None else bias.double())).to(got.dtype)


@wrong_kernel(
    FP8,
    "the result is rounded to fp8 on its way",
    "an fp8 model answers worse",
    kit="values",
    sizes=MIXED,
    by=spoilt,
)
def result_through_fp8(got, *args):
    most = got.abs().amax().clamp(min=1e-6).float().nan_to_num(1.0, 1.0) / 448
    through = (got.float() / most).to(torch.float8_e4m3fn).float() * most
    return torch.where(got.isfinite(), through.to(got.dtype), got)


@wrong_kernel(
    FP8,
    "reads the numbers as e5m2",
    WORSE,
    kit="values",
    sizes=MIXED,
    by=changed,
)
def reads_e5m2(a):
    for name in ("x", "weight"):
        read = a[name].contiguous().view(torch.uint8).view(torch.float8_e5m2).float()
        a[name] = read.nan_to_num(0.0, 0.0, 0.0).clamp(-448, 448).to(torch.float8_e4m3fn)


@wrong_kernel(
    FP8,
    "of an odd number of features the last one is left out",
    "a model cut among an odd number of GPUs answers a little worse",
    kit="values",
    sizes=MIXED,
    by=changed,
)
def last_odd_feature(a):
    if a["x"].shape[1] % 2 and a["x"].shape[1] > 1:
        a["x"], a["weight"] = a["x"][:, :-1], a["weight"][:, :-1]


GATED, NONSENSE = "linear_silu_and_mul", "models with SwiGLU answer nonsense"


def _halves(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up of a call, exact."""
    gate, up = (x.double() @ weight.double().t()).chunk(2, dim=-1)
    return gate, up


@wrong_kernel(
    GATED,
    "takes up for gate",
    NONSENSE,
    kit="values",
    sizes=MIXED,
    by=changed,
)
def up_for_gate(a):
    a["weight"] = a["weight"].roll(len(a["weight"]) // 2, 0)


@wrong_kernel(
    GATED,
    "takes the weight's rows for gate and up by turns",
    NONSENSE,
    kit="values",
    sizes=MIXED,
    by=changed,
)
def gate_and_up_by_turns(a):
    a["weight"] = torch.cat((a["weight"][::2], a["weight"][1::2]))


@wrong_kernel(
    GATED,
    "up goes through silu, too",
    NONSENSE,
    kit="values",
    sizes=MIXED,
    by=spoilt,
)
def silu_of_up_too(got, *args):
    gate, up = _halves(*args)
    return (F.silu(gate) * F.silu(up)).to(got.dtype)


@wrong_kernel(
    GATED,
    "quick GELU in the place of silu",
    "a model answers worse",
    kit="values",
    sizes=MIXED,
    by=spoilt,
)
def quick_gelu_of_the_gate(got, *args):
    gate, up = _halves(*args)
    return (gate * torch.sigmoid(1.702 * gate) * up).to(got.dtype)


@wrong_kernel(
    GATED,
    "NaN where exp of the gate is beyond float32",
    "a token with a massive activation ends a request in nonsense",
    kit="values",
    sizes=MIXED,
    by=spoilt,
)
def far_gate_not_a_number(got, *args):
    return got.masked_fill(_halves(*args)[0] > 88.0, float("nan"))


@wrong_kernel(
    GATED,
    "output features beyond whole tiles of 32 are never written",
    "a model cut among an odd number of GPUs answers a little worse",
    kit="values",
    sizes=MIXED,
    by=spoilt,
)
def output_features_beyond_tiles(got, *args):
    got[:, got.shape[1] // 32 * 32 :] = 0
    return got


OF_GELU = "linear_gelu_tanh_and_mul"


@wrong_kernel(
    OF_GELU,
    "silu in the place of gelu",
    "models with GeGLU answer nonsense",
    kit="values",
    sizes=MIXED,
    by=spoilt,
)
def silu_of_the_gate(got, *args):
    gate, up = _halves(*args)
    return (F.silu(gate) * up).to(got.dtype)


@wrong_kernel(
    OF_GELU,
    "leaves the cube of the gate out",
    "a model answers worse",
    kit="values",
    sizes=MIXED,
    by=spoilt,
)
def gelu_without_the_cube(got, *args):
    gate, up = _halves(*args)
    return (0.5 * gate * (1 + (gate * (2 / torch.pi) ** 0.5).tanh()) * up).to(got.dtype)


@wrong_kernel(
    OF_GELU,
    "NaN where exp of the gate's cube is beyond float32",
    "a token with a massive activation ends a request in nonsense",
    kit="values",
    sizes=MIXED,
    by=spoilt,
)
def far_cube_not_a_number(got, *args):
    return got.masked_fill(_halves(*args)[0] > 11.0, float("nan"))
