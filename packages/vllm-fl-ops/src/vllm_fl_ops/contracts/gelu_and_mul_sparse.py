"""Gemma 3n's activation: GeGLU of those gates alone that lie far above their row's mean."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.arguments import Argument, Problem, word
from vllm_fl.contracts.sampling import Source
from vllm_fl.contracts.spec import Sample

from .activations import activation, activation_inputs, broken_row
from .common import not_finite, of_layer, rounded
from .gelu_and_mul import APPROXIMATIONS

if TYPE_CHECKING:
    import torch

__all__ = ["SPEC"]


def gelu_and_mul_sparse(
    x: torch.Tensor, std_multiplier: float, approximate: str = "none"
) -> torch.Tensor:
    """gelu(max(gate - cutoff, 0)) * x[..., d:], where d = x.shape[-1] // 2.

    gate is x[..., :d]; cutoff is mean(gate) + std_multiplier * std(gate) of its row, std being that
    of the d gates themselves (divided by d, not by d - 1). gelu is as in `gelu_and_mul`.

    Args:
        x: (..., 2 * d), float32, float16 or bfloat16, of any layout: gate, then up projection; d is
            1 or more, unless there are no rows. It is this rank's part of a layer. Nothing is
            promised of a row with NaN or infinity, whose mean is none.
        std_multiplier: how many deviations above the mean the cutoff lies; a finite number, or a
            tensor with one, as layers before vLLM 0.30 have it. The normal distribution's quantile
            of the share of gates that shall be 0.
        approximate: "none" or "tanh".

    Returns:
        (..., d), contiguous, of x's dtype and on its device. x is left as it was.

    Raises:
        CallError: x is not a tensor of such a dtype, its last dimension is odd, std_multiplier is
            not such a number, or `approximate` is another word.

    Source: Gemma 3n, as `Gemma3nTextMLP` of Hugging Face Transformers 4.53 computes it
    (`_gaussian_topk`).
    """
    if approximate not in APPROXIMATIONS:
        raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
    gate, up = x.double().chunk(2, dim=-1)
    centred = gate - gate.mean(-1, keepdim=True)
    deviation = centred.square().mean(-1, keepdim=True).sqrt()
    above = (centred - std_multiplier * deviation).clamp(min=0)
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (above + 0.044715 * above**3)
        return 0.5 * above * (1 + inner.tanh()) * up
    return 0.5 * above * (-above / math.sqrt(2)).erfc() * up


def _by_torch(x: torch.Tensor, std_multiplier: float, approximate: str = "none") -> torch.Tensor:
    from torch import std_mean
    from torch.nn.functional import gelu, relu

    half = x.shape[-1] // 2
    gate, up = x[..., :half].double(), x[..., half:].double()
    deviation, mean = std_mean(gate, dim=-1, correction=0, keepdim=True)
    return gelu(relu(gate - (mean + deviation * std_multiplier)), approximate=approximate) * up


GEMMA = 1.6448536
"""Of a share of 0.95, which Gemma 3n has in its first layers."""


def _samples(source: Source) -> Iterator[Sample]:
    for name, x in activation_inputs(source, 2):
        # Far ones are products of about 40 * 40.
        yield Sample(name, (x, GEMMA, "tanh"), 1600.0 if name == "far from zero" else 1.0)
    shifted = source.normal(6, 2 * 128)
    shifted[:, :128] += 1.0
    yield Sample("mean of 1, half of the gates", (shifted, 0.0, "none"))
    yield Sample("most gates, approximate=none", (shifted, -1.25, "none"))
    yield Sample("NaN in a row", (broken_row(source, 2), GEMMA, "tanh"), open_rows=(1,))


class Multiplier(Argument):
    """A number, or a tensor with one."""

    def problem(self, name: str, value: Any, call: dict[str, Any]) -> Problem:
        return None if hasattr(value, "numel") else super().problem(name, value, call)


SPEC = activation(
    gelu_and_mul_sparse,
    _by_torch,
    rounded(
        float32=(1e-5, "; atol as gate and cutoff cancel"),
        float16=(
            4e-3,
            "; atol because vLLM's native rounds the cutoff, and gates lie a little above it: "
            "seen up to 1.8e-3 beyond that, in 257 rows of 3072",
        ),
        bfloat16=(
            3e-2,
            "; atol because vLLM's native rounds the cutoff: seen up to 1.7e-2 beyond that, in "
            "257 rows of 3072",
        ),
    ),
    gated=True,
    beside={
        "std_multiplier": Multiplier(kind="float", classes=(int, float)),
        "approximate": word(*APPROXIMATIONS),
    },
    samples=_samples,
    call=lambda x: (x, GEMMA, "tanh"),
    power=2,  # of a product
    bad=lambda good: not_finite("std_multiplier"),
    **of_layer("std_multiplier", "approximate"),
)
