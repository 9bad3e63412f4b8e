"""Root-mean-square normalisation with a gate, for linear attention and Mamba 2."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.arguments import flag, integer, like, scalar, tensor, word
from vllm_fl.contracts.sampling import Source, peak
from vllm_fl.contracts.spec import ModelSizes, Sample

from .common import contract, of_layer, rounded

if TYPE_CHECKING:
    import torch

ACTIVATIONS = ("silu", "swish", "sigmoid")
"""Activations of the gate. The first two are names of the same function, z * sigmoid(z)."""


def rms_norm_gated(
    x: torch.Tensor,
    z: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    activation: str = "swish",
) -> torch.Tensor:
    """norm(x) * act(z), or norm(x * act(z)).

    norm(y) = y / sqrt(mean(y**2) + epsilon) * weight. The mean is over each group of `group_size`
    features of the last dimension.

    Args:
        x: (..., hidden), float32, float16 or bfloat16, of any layout. A NaN in a group of x or z
            gives NaN wherever the formula does, and affects no other row.
        z: the gate, of x's shape, dtype and device, of any layout; None for norm(x) without a gate.
        weight: (hidden,), of x's dtype or float32, on x's device.
        epsilon: added to the mean of squares, in its units; finite and above 0.
        group_size: features of a group, a divisor of hidden; None for all.
        norm_before_gate: True for norm(x) * act(z), False for norm(x * act(z)).
        activation: act: `silu` or `swish` for z * sigmoid(z), `sigmoid` for sigmoid(z).

    Returns:
        (..., hidden), contiguous, of x's dtype and device. x and z are not modified.

    Raises:
        CallError: an argument violates this contract.

    Source: Dao and Gu, "Transformers are SSMs" (arXiv:2405.21060), section 7.2, the norm before the
    last projection; variants: vLLM's `RMSNormGated`.
    """
    import torch

    y = x.double()
    gate = torch.ones_like(y) if z is None else z.double().sigmoid()
    if z is not None and activation != "sigmoid":
        gate = gate * z.double()
    if not norm_before_gate:
        y = y * gate
    groups = y.unflatten(-1, (-1, group_size or x.shape[-1]))
    normed: torch.Tensor = groups * (groups.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt()
    normed = normed.flatten(-2)
    normed = normed * weight.double()
    return normed * gate if norm_before_gate else normed


def _by_groups(*call: Any) -> torch.Tensor:
    import torch

    x, z, weight, epsilon, group_size, norm_before_gate, activation = call
    size = x.shape[-1] if group_size is None else group_size
    gate: torch.Tensor | float = 1.0
    if z is not None:
        wide = z.double()
        gate = 0.5 + 0.5 * (wide / 2).tanh()
        gate = gate if activation == "sigmoid" else torch.nn.functional.silu(wide)
    first, last = (1.0, gate) if norm_before_gate else (gate, 1.0)
    parts = []
    for part in (x.double() * first).split(size, dim=-1):
        squares = (part**2).sum(-1, keepdim=True)
        parts.append(part / (squares / size + epsilon) ** 0.5)
    result: torch.Tensor = torch.cat(parts, dim=-1) * weight.double() * last
    return result


def _samples(source: Source) -> Iterator[Sample]:
    import torch

    def sample(name: str, rows: tuple[int, ...], *rest: Any, epsilon: float = 1e-5) -> Sample:
        x, z = source.normal(*rows), source.normal(*rows, scale=2.0)
        return Sample(name, (x, z, source.normal(rows[-1]), epsilon, *rest))

    yield sample("1 token", (1, 128), None, True, "swish")
    yield sample("16 tokens", (16, 128), None, False, "swish")
    yield sample("0 tokens", (0, 128), None, True, "silu")
    yield sample("sigmoid, heads apart, odd size", (3, 2, 37), None, True, "sigmoid")
    yield sample("groups, gated first", (5, 512), 128, False, "silu")
    yield sample("groups, gated last, odd sizes", (3, 111), 37, True, "swish")
    yield sample("sigmoid first", (4, 256), 64, False, "sigmoid")
    yield sample("groups of 1 feature", (2, 8), 1, True, "swish")
    x, z = source.normal(5, 2 * 192).split(192, dim=-1)
    weight = source.normal(192, dtype=torch.float32)
    yield Sample("halves of a wider buffer, fp32 weight", (x, z, weight, 1e-6, 96, False, "silu"))
    x, z = source.normal(4, 256, scale=3e-3), source.normal(4, 256, scale=20.0)
    yield Sample(
        "epsilon matters, gate far from 0", (x, z, source.normal(256), 1e-5, None, True, "swish")
    )
    yield Sample("z=None", (x, None, source.normal(256), 1e-6, 64, True, "swish"))
    x, z = source.normal(5, 256), source.normal(5, 256)
    x[1, 7], x[2], z[3, 200] = math.nan, 0.0, math.nan
    yield Sample("NaN, and a row of zeros", (x, z, source.normal(256), 1e-5, 64, True, "swish"))


def _served(source: Source, sizes: ModelSizes, gated_norm: int) -> Iterator[Sample]:
    hidden, group = gated_norm, gated_norm // int(sizes.more.get("gated_norm_groups") or 1)
    for tokens in sizes.tokens:
        for first in (True, False):
            x, z = source.normal(tokens, hidden), source.normal(tokens, hidden)
            if source.large:  # the norm's result times the gate stays below fp16's 65504
                x = source.spiked(tokens, hidden, scale=30.0, peak=peak(source.dtype))
                z = source.spiked(tokens, hidden, scale=4.0, peak=50.0)
            weight = source.normal(hidden)
            name = f"{tokens} x {hidden} by {group}, gated {'last' if first else 'first'}"
            args = (x, z, weight, sizes.epsilon, group, first, "swish")
            yield Sample(name + ", large" * source.large, args, 50.0 if source.large else 1.0)


def _bad(good: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "x and z of integers", {name: good[name].long() for name in "xz"}
    yield "weight of 1, with groups", {"weight": good["weight"][:1], "group_size": 4}
    yield "norm_before_gate is not a bool", {"norm_before_gate": "yes"}


SPEC = contract(
    rms_norm_gated,
    {
        "x": tensor("..., hidden", where="hidden >= 1"),
        "z": like("x").optional(),
        "weight": tensor("hidden", "x", "float32"),
        "epsilon": scalar("value > 0"),
        "group_size": integer("value >= 1 and hidden % value == 0").optional(),
        "norm_before_gate": flag(),
        "activation": word(*ACTIVATIONS),
    },
    (like("x"),),
    bad=_bad,
    group="norms",
    samples=_samples,
    served=_served,
    read_whole=frozenset({"weight"}),
    second_form=_by_groups,
    tolerances=rounded(
        float32=(1e-5, "; room for a fast exp and rsqrt"),
        float16=(
            1e-5,
            ": the norm, the gate, their product, the weight; atol for subnormals below 6e-5",
        ),
        bfloat16=(1e-5, "; atol as for float32"),
    ),
    **of_layer(
        weight="weight.data",
        epsilon="eps",
        group_size="group_size",
        norm_before_gate="norm_before_gate",
        activation="activation",
    ),
)
