"""Activations of an MLP with a gate: functions of two halves of the features."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.arguments import Argument, Problem, scalar, word
from vllm_fl.contracts.sampling import Source
from vllm_fl.contracts.spec import ModelSizes, Sample

from .activations import (
    activation_inputs,
    activation_spec,
    broken_row,
    gated_inputs,
    served_gated_inputs,
)
from .common import not_finite, of_layer, rounded

if TYPE_CHECKING:
    import torch


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(x[..., :d]) * x[..., d:], where d = x.shape[-1] // 2 and silu(g) = g * sigmoid(g).

    Args:
        x: (..., 2 * d), float32, float16 or bfloat16, of any layout: gate, then up projection.

    Returns:
        (..., d), contiguous, of x's dtype and device. x is not modified.

    Raises:
        CallError: an argument violates this contract.

    Source: Shazeer, "GLU Variants Improve Transformer" (arXiv:2002.05202), SwiGLU.
    """
    gate, up = x.double().chunk(2, dim=-1)
    return gate * gate.sigmoid() * up


def _silu_by_torch(x: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import silu

    gate, up = x.double().chunk(2, dim=-1)
    return silu(gate) * up


def mul_and_silu(x: torch.Tensor) -> torch.Tensor:
    """x[..., :d] * silu(x[..., d:]), where d = x.shape[-1] // 2 and silu(g) = g * sigmoid(g).

    Args:
        x: (..., 2 * d), float32, float16 or bfloat16, of any layout: up, then gate projection.

    Returns:
        (..., d), contiguous, of x's dtype and device. x is not modified.

    Raises:
        CallError: an argument violates this contract.

    Source: Shazeer, "GLU Variants Improve Transformer" (arXiv:2002.05202), SwiGLU; the order of the
    halves as in Molmo and Ultravox.
    """
    up, gate = x.double().chunk(2, dim=-1)
    return up * gate * gate.sigmoid()


def _mul_by_torch(x: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import silu

    up, gate = x.double().chunk(2, dim=-1)
    return up * silu(gate)


APPROXIMATIONS = ("none", "tanh")


def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu(x[..., :d]) * x[..., d:], where d = x.shape[-1] // 2.

    gelu(g) is g * (1 + erf(g / sqrt(2))) / 2, or with approximate="tanh"
    g * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g**3))) / 2.

    Args:
        x: (..., 2 * d), float32, float16 or bfloat16, of any layout: gate, then up projection.
        approximate: "none" or "tanh".

    Returns:
        (..., d), contiguous, of x's dtype and device. x is not modified.

    Raises:
        CallError: an argument violates this contract.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (arXiv:1606.08415); Shazeer, "GLU
    Variants Improve Transformer" (arXiv:2002.05202), GEGLU.
    """
    gate, up = x.double().chunk(2, dim=-1)
    return _gelu(gate, approximate) * up


def _gelu(gate: torch.Tensor, approximate: str) -> torch.Tensor:
    if approximate not in APPROXIMATIONS:
        raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + inner.tanh())
    # erfc keeps the digits that 1 + erf loses for a negative gate
    return 0.5 * gate * (-gate / math.sqrt(2)).erfc()


def _gelu_by_torch(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    from torch.nn.functional import gelu

    gate, up = x.double().chunk(2, dim=-1)
    return gelu(gate, approximate=approximate) * up


def _gelu_samples(source: Source) -> Iterator[Sample]:
    for approximate in APPROXIMATIONS:
        for name, x in gated_inputs(Source(source.dtype, source.device)):
            yield Sample(f"{name}, approximate={approximate}", (x, approximate))


def _gelu_served(source: Source, sizes: ModelSizes) -> Iterator[Sample]:
    for approximate in APPROXIMATIONS:
        own = Source(source.dtype, source.device, source.large)
        for name, x, scale in served_gated_inputs(own, sizes):
            yield Sample(f"{name}, approximate={approximate}", (x, approximate), scale)


def gelu_and_mul_sparse(
    x: torch.Tensor, std_multiplier: float, approximate: str = "none"
) -> torch.Tensor:
    """gelu(max(gate - cutoff, 0)) * x[..., d:], where d = x.shape[-1] // 2.

    gate is x[..., :d], and cutoff is mean(gate) + std_multiplier * std(gate), over the d gates of a
    row. std divides by d, not by d - 1. gelu is as in `gelu_and_mul`.

    Args:
        x: (..., 2 * d), float32, float16 or bfloat16, of any layout: gate, then up projection, both
            for this rank's part of a layer. d is at least 1, unless there are no rows. The result
            of a row with NaN or infinity is unspecified.
        std_multiplier: the distance from mean to cutoff in standard deviations. It is the quantile
            of the normal distribution for the share of gates to set to 0. A finite number, or (in
            layers before vLLM 0.30) a tensor with one element.
        approximate: "none" or "tanh".

    Returns:
        (..., d), contiguous, of x's dtype and device. x is not modified.

    Raises:
        CallError: an argument violates this contract.

    Source: Gemma 3n, as in `Gemma3nTextMLP` of Hugging Face Transformers 4.53 (`_gaussian_topk`).
    """
    gate, up = x.double().chunk(2, dim=-1)
    centred = gate - gate.mean(-1, keepdim=True)
    deviation = centred.square().mean(-1, keepdim=True).sqrt()
    return _gelu((centred - std_multiplier * deviation).clamp(min=0), approximate) * up


def _sparse_by_torch(
    x: torch.Tensor, std_multiplier: float, approximate: str = "none"
) -> torch.Tensor:
    from torch import std_mean
    from torch.nn.functional import gelu, relu

    half = x.shape[-1] // 2
    gate, up = x[..., :half].double(), x[..., half:].double()
    deviation, mean = std_mean(gate, dim=-1, correction=0, keepdim=True)
    return gelu(relu(gate - (mean + deviation * std_multiplier)), approximate=approximate) * up


GEMMA = 1.6448536
"""The multiplier that sets a share of 0.95 of the gates to 0, as Gemma 3n's first layers do."""


def _bad_multipliers(good: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from not_finite("std_multiplier")
    yield "std_multiplier of two elements", {"std_multiplier": good["x"].new_zeros(2)}


def _sparse_samples(source: Source) -> Iterator[Sample]:
    for name, x in activation_inputs(source, 2):
        # Results far from zero are products of about 40 * 40.
        yield Sample(name, (x, GEMMA, "tanh"), 1600.0 if name == "far from zero" else 1.0)
    shifted = source.normal(6, 2 * 128)
    shifted[:, :128] += 1.0
    yield Sample("mean of 1, half of the gates", (shifted, 0.0, "none"))
    yield Sample("most gates, approximate=none", (shifted, -1.25, "none"))
    yield Sample("NaN in a row", (broken_row(source, 2), GEMMA, "tanh"), open_rows=(1,))


class Multiplier(Argument):
    """A number, or a tensor with one element."""

    def problem(self, name: str, value: Any, call: dict[str, Any]) -> Problem:
        if not hasattr(value, "numel"):
            return super().problem(name, value, call)
        return None if value.numel() == 1 else (name, f"must have one element, got {value.numel()}")


def fatrelu_and_mul(x: torch.Tensor, threshold: float = 0.0) -> torch.Tensor:
    """gate * x[..., d:], where d = x.shape[-1] // 2.

    gate is x[..., :d] above `threshold`, and 0 elsewhere.

    Args:
        x: (..., 2 * d), float32, float16 or bfloat16, of any layout: gate, then up projection. The
            result for a NaN in the gate is unspecified, because vLLM's CUDA kernel reads it as 0.
        threshold: in the units of x; finite. If x's dtype cannot represent it, it may be rounded to
            that dtype before the comparison.

    Returns:
        (..., d), contiguous, of x's dtype and device. x is not modified.

    Raises:
        CallError: an argument violates this contract.

    Source: Song et al., "ProSparse: Introducing and Enhancing Intrinsic Activation Sparsity within
    Large Language Models" (arXiv:2402.13516), FATReLU.
    """
    gate, up = x.double().chunk(2, dim=-1)
    return gate.masked_fill(gate <= threshold, 0.0) * up


def _fatrelu_by_product(x: torch.Tensor, threshold: float = 0.0) -> torch.Tensor:
    half = x.shape[-1] // 2
    gate, up = x[..., :half].double(), x[..., half:].double()
    return (gate > threshold).double() * (gate * up)


def _near_threshold(source: Source) -> Iterator[Sample]:
    near = source.normal(8, 2 * 128)
    near[:, ::3] = 0.5
    yield Sample("gates at the threshold", (near, 0.5))
    yield Sample("threshold below 0", (near, -0.5))


def swigluoai_and_mul(x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate), of clamped pairs (gate, up).

    gate is x[..., ::2], at most `limit`; up is x[..., 1::2], from -limit to limit.

    Args:
        x: (..., 2 * d), float32, float16 or bfloat16, of any layout: features of the gate and the
            up projection alternate. The result for a NaN is unspecified, because some CUDA kernels
            of vLLM clamp it to `limit`.
        alpha: how steep the sigmoid is; finite.
        limit: in the units of x; finite and above 0. If x's dtype cannot represent it, it may be
            rounded to that dtype.

    Returns:
        (..., d), contiguous, of x's dtype and device. x is not modified.

    Raises:
        CallError: an argument violates this contract.

    Source: OpenAI, gpt-oss (arXiv:2508.10925), the activation of its experts, computed as in
    `GptOssExperts` of Hugging Face Transformers 4.55.
    """
    wide = x.double()
    gate, up = wide[..., ::2].clamp(max=limit), wide[..., 1::2].clamp(-limit, limit)
    return (up + 1) * gate * (alpha * gate).sigmoid()


def _swigluoai_by_tanh(x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    import torch

    most = torch.tensor(limit, dtype=torch.float64, device=x.device)
    gate, up = x.double().unflatten(-1, (-1, 2)).unbind(-1)
    gate = torch.minimum(gate, most)
    up = torch.sign(up) * torch.minimum(up.abs(), most)
    return gate * (0.5 + 0.5 * torch.tanh(gate * alpha / 2)) + up * gate / (
        1 + torch.exp(-alpha * gate)
    )


def _swigluoai_samples(source: Source) -> Iterator[Sample]:
    for name, x in gated_inputs(source):
        if not name.startswith("NaN"):
            yield Sample(name, (x, 1.702, 7.0))
    infinite = source.normal(5, 2 * 256)
    infinite[1, 6], infinite[1, 9], infinite[3, 301] = math.inf, math.inf, -math.inf
    yield Sample("infinity, which is clamped", (infinite, 1.702, 7.0))
    far = source.normal(16, 2 * 128, scale=6.0)
    yield Sample("beyond the limit on either side", (far, 1.702, 7.0))
    yield Sample("another limit", (far, 1.702, 1.5))
    yield Sample("another alpha", (far, 1.0, 7.0))
    yield Sample("alpha of 0, which leaves half of the gate", (far, 0.0, 7.0))
    yield Sample("NaN in a row", (broken_row(source, 2), 1.702, 7.0), open_rows=(1,))


def _in_pairs(x: torch.Tensor) -> tuple[Any, ...]:
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2), 1.702, 7.0


def silu_and_mul_with_clamp(
    x: torch.Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0
) -> torch.Tensor:
    """gate * sigmoid(alpha * gate) * (up + beta), of clamped halves, where d = x.shape[-1] // 2.

    gate is x[..., :d], at most `limit`; up is x[..., d:], from -limit to limit. `swigluoai_and_mul`
    is the same function of pairs, with alpha 1.702 and beta 1.

    Args:
        x: (..., 2 * d), float32, float16 or bfloat16, of any layout: gate, then up projection. The
            result for a NaN is unspecified, because vLLM's CUDA kernel clamps it to `limit`.
        limit: in the units of x; finite and above 0. If x's dtype cannot represent it, it may be
            rounded to that dtype.
        alpha: how steep the sigmoid is; finite.
        beta: added to up, in the units of x; finite.

    Returns:
        (..., d), contiguous, of x's dtype and device. x is not modified.

    Raises:
        CallError: an argument violates this contract.

    Source: the `swiglu_limit` of DeepSeek-V4's experts, computed as in vLLM's
    `SiluAndMulWithClamp`; alpha and beta as in gpt-oss (arXiv:2508.10925).
    """
    gate, up = x.double().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * (alpha * gate).sigmoid() * (up + beta)


def _clamped_by_tanh(
    x: torch.Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0
) -> torch.Tensor:
    import torch

    most = torch.tensor(limit, dtype=torch.float64, device=x.device)
    gate, up = x.double().unflatten(-1, (2, -1)).unbind(-2)
    gate = torch.minimum(gate, most)
    up = torch.sign(up) * torch.minimum(up.abs(), most)
    silu = gate * (0.5 + 0.5 * torch.tanh(gate * alpha / 2))
    return silu * up + silu * beta


def _beyond_limits(source: Source) -> Iterator[Sample]:
    infinite = source.normal(5, 2 * 256)
    infinite[1, 6], infinite[1, 262], infinite[3, 301] = math.inf, math.inf, -math.inf
    yield Sample("infinity, which is clamped", (infinite, 10.0, 1.0, 0.0))
    far = source.normal(16, 2 * 128, scale=6.0)
    yield Sample("another limit, alpha and beta", (far, 1.5, 1.702, 1.0))


SILU = rounded(
    float32=(1e-5, "; room for a fast exp"),
    float16=(
        1e-4,
        ": vLLM's native code rounds silu and the product (2); atol for subnormals below 6e-5 and "
        "a fast exp",
    ),
    bfloat16=(1e-4, "; atol for a fast exp of a far gate"),
)


SPECS = (
    activation_spec(
        silu_and_mul,
        _silu_by_torch,
        SILU,
        gated=True,
        samples=lambda source: (Sample(name, (x,)) for name, x in gated_inputs(source)),
    ),
    activation_spec(mul_and_silu, _mul_by_torch, SILU, gated=True),
    activation_spec(
        gelu_and_mul,
        _gelu_by_torch,
        rounded(
            float32=(1e-5, "; atol because 1 + erf cancels for a negative gate"),
            float16=(
                1e-4,
                ": vLLM's native code rounds gelu and the product (2); atol for that cancellation "
                "in fp32 and for subnormals below 6e-5",
            ),
            bfloat16=(1e-4, "; atol for that cancellation in fp32"),
        ),
        gated=True,
        beside={"approximate": word(*APPROXIMATIONS)},
        samples=_gelu_samples,
        served=_gelu_served,
        **of_layer("approximate"),
    ),
    activation_spec(
        gelu_and_mul_sparse,
        _sparse_by_torch,
        rounded(
            float32=(1e-5, "; atol because gate and cutoff cancel"),
            float16=(
                4e-3,
                "; atol because vLLM's native code rounds the cutoff, and some gates are just "
                "above it: measured up to 1.8e-3 beyond rtol, in 257 rows of 3072",
            ),
            bfloat16=(
                3e-2,
                "; atol because vLLM's native code rounds the cutoff: measured up to 1.7e-2 "
                "beyond rtol, in 257 rows of 3072",
            ),
        ),
        gated=True,
        beside={
            "std_multiplier": Multiplier(kind="float", classes=(int, float)),
            "approximate": word(*APPROXIMATIONS),
        },
        samples=_sparse_samples,
        call=lambda x: (x, GEMMA, "tanh"),
        power=2,  # results are products
        bad=_bad_multipliers,
        **of_layer("std_multiplier", "approximate"),
    ),
    activation_spec(
        fatrelu_and_mul,
        _fatrelu_by_product,
        rounded(
            float32=(1e-9, "; one product, rounded once"),
            float16=(1e-6, "; atol for subnormals, which are 6e-8 apart"),
            bfloat16=(1e-6, ""),
        ),
        gated=True,
        beside={"threshold": scalar()},
        special=False,
        further=_near_threshold,
        call=lambda x: (x, 0.25),  # every dtype represents 0.25
        bad=lambda good: not_finite("threshold"),
        **of_layer("threshold"),
    ),
    activation_spec(
        swigluoai_and_mul,
        _swigluoai_by_tanh,
        rounded(
            float32=(1e-5, "; room for a fast exp"),
            float16=(
                4e-4,
                "; atol because vLLM's native code rounds alpha * gate before the sigmoid: "
                "measured up to 2.8e-4 beyond rtol, at a gate near -2.4 and up at the limit",
            ),
            bfloat16=(
                1e-3,
                "; atol because vLLM's native code rounds alpha * gate before the sigmoid: "
                "measured up to 6.4e-4 beyond rtol, at a gate near -2.8",
            ),
        ),
        gated=True,
        beside={"alpha": scalar(), "limit": scalar("value > 0")},
        samples=_swigluoai_samples,
        call=_in_pairs,
        power=0,  # clamped: results have magnitude 1 for any x
        bad=lambda good: not_finite("alpha", "limit"),
        **of_layer("alpha", "limit"),
    ),
    activation_spec(
        silu_and_mul_with_clamp,
        _clamped_by_tanh,
        rounded(
            float32=(1e-5, "; room for a fast exp"),
            float16=(
                4e-4,
                "; atol because vLLM's native code rounds alpha * gate and up + beta: measured up "
                "to 2.1e-4 beyond rtol, at a result of -0.3",
            ),
            bfloat16=(
                1e-3,
                "; atol because vLLM's native code rounds alpha * gate and up + beta: measured up "
                "to 7.2e-4 beyond rtol, at a result of -0.11",
            ),
        ),
        gated=True,
        beside={"limit": scalar("value > 0"), "alpha": scalar(), "beta": scalar()},
        special=False,
        further=_beyond_limits,
        call=lambda x: (x, 7.0, 1.0, 0.0),
        power=0,  # clamped: results are below 50 for any x
        bad=lambda good: not_finite("limit", "alpha", "beta"),
        **of_layer(limit="swiglu_limit", alpha="alpha", beta="beta"),
    ),
)
