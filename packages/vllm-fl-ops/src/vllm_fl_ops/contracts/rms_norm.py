"""Root-mean-square normalisation, with or without a residual addition before it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.arguments import integer, like, scalar, tensor
from vllm_fl.contracts.sampling import Source, peak
from vllm_fl.contracts.spec import ModelSizes, Sample, Variant

from .common import contract, rounded

if TYPE_CHECKING:
    import torch


def rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y / sqrt(mean(y**2) + epsilon) * weight, where y = x + residual, or x without a residual.

    The mean is over the last dimension. y is computed in fp32, and the fp32 sum is normalised, not
    the sum rounded to x's dtype.

    Args:
        x: (..., hidden), float32, float16 or bfloat16, of any layout, such as the heads of a q
            projection, a strided (tokens, heads, head_size) view of the qkv buffer. A row with NaN
            gives NaN, a row with infinity gives 0 and NaN, and other rows are not affected.
        residual: of x's shape, dtype and device, of any layout, or None.
        weight: (hidden,), of x's dtype or float32, on x's device, or None for 1.
        epsilon: added to the mean of squares, in its units; finite and not negative.
        variance_size: take the mean over the first `variance_size` features only; None for all.

    Returns:
        The normalised tensor, or (normalised, y) with a residual: y, in x's dtype, is the next
        residual. Both are contiguous, of x's shape, dtype and device. The inputs are not modified,
        except x and residual if the implementation may consume them and there is a residual.

    Raises:
        CallError: an argument violates this contract.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467); order of
    the casts: `vllm.ir.ops.rms_norm` and `fused_add_rms_norm`.
    """
    y = x.double() if residual is None else x.double() + residual.double()
    variance = y[..., :variance_size].square().mean(dim=-1, keepdim=True)
    normed = y * (variance + epsilon).rsqrt()
    if weight is not None:
        normed = normed * weight.double()
    return normed if residual is None else (normed, y)


def _by_sums(*call: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    x, residual, weight, epsilon, variance_size = call
    y = x.double() if residual is None else x.double() + residual.double()
    seen = y.shape[-1] if variance_size is None else variance_size
    mean = (y[..., :seen] ** 2).sum(-1, keepdim=True) / seen
    normed: torch.Tensor = y / (mean + epsilon) ** 0.5
    normed = normed if weight is None else normed * weight.double()
    return normed if residual is None else (normed, y)


def _samples(source: Source) -> Iterator[Sample]:
    import torch

    for name, shape in (
        ("1 token", (1, 1024)),
        ("16 tokens", (16, 4096)),
        ("0 tokens", (0, 1024)),
        ("1 feature", (3, 1)),
        ("odd sizes", (7, 129)),
        ("odd sizes beyond one block", (3, 2063)),
        ("wide", (2, 8192)),
        ("3-D", (2, 3, 64)),
        ("4-D", (2, 3, 2, 64)),
    ):
        yield from _both(name, source, source.normal(*shape))

    x = source.normal(4, 1024)
    weight = source.normal(1024)
    yield Sample("weight=None", (x, None, None, 1e-6, None))
    yield Sample("weight=None, residual", (x, source.normal(4, 1024), None, 1e-6, None))
    wide = source.normal(1024, dtype=torch.float32)
    yield Sample("fp32 weight", (x, None, wide, 1e-6, None))
    yield Sample("fp32 weight, residual", (x, source.normal(4, 1024), wide, 1e-6, None))
    for residual in (None, source.normal(300, 320)):
        call = source.normal(300, 320), residual, source.normal(320, dtype=torch.float32), 1e-6
        yield Sample(f"fp32 weight, 300 rows{', residual' * (residual is not None)}", (*call, None))
    yield Sample("variance_size", (x, None, weight, 1e-6, 768))
    yield Sample("variance_size, residual", (x, source.normal(4, 1024), weight, 1e-6, 768))

    qkv = source.normal(5, (16 + 2 * 8) * 128)
    per_head = source.normal(128)
    query = qkv[:, : 16 * 128].view(5, 16, 128)
    key = qkv[:, 16 * 128 : 24 * 128].view(5, 8, 128)
    yield Sample("query heads, strided out of qkv", (query, None, per_head, 1e-6, None))
    yield Sample("key heads, strided out of qkv", (key, None, per_head, 1e-6, None))
    latent = source.normal(5, 512 + 64)[:, :512]
    yield from _both("first columns of a wider buffer", source, latent)

    yield from _both("squares overflow fp16", source, source.normal(4, 512, scale=1000.0))
    yield from _both("epsilon matters", source, source.normal(4, 512, scale=1e-3), epsilon=1e-5)
    small = source.normal(4, 512, scale=1e-5)  # squares of the order of 1e-10
    yield from _both("epsilon is all", source, small, epsilon=3e-6)
    padded = source.normal(3, 512)
    padded[1] = 0.0
    yield from _both("a row of zeros", source, padded)
    broken = source.normal(4, 512)
    broken[1, 7], broken[3, 300] = float("nan"), float("inf")
    yield from _both("NaN and infinity", source, broken)


def _both(name: str, source: Source, x: torch.Tensor, epsilon: float = 1e-6) -> Iterator[Sample]:
    weight = source.normal(x.shape[-1])
    largest = x[x.isfinite()].abs().amax() if x.numel() else x.new_ones(())
    residual = source.normal(*x.shape) * (largest / 4)
    yield Sample(name, (x, None, weight, epsilon, None))
    yield Sample(f"{name}, residual", (x, residual.to(x.dtype), weight, epsilon, None))


def _served(source: Source, sizes: ModelSizes) -> Iterator[Sample]:
    eps, heads, kv_heads, size = sizes.epsilon, sizes.heads, sizes.kv_heads, sizes.head_size
    for tokens in sizes.tokens:
        if sizes.hidden is not None:
            weight = source.normal(sizes.hidden)
            x, residual = (_activations(source, tokens, sizes.hidden) for _ in range(2))
            name = f"{tokens} x {sizes.hidden}{', large' * source.large}"
            yield Sample(name, (x, None, weight, eps, None))
            yield Sample(f"{name}, residual", (x.clone(), residual, weight, eps, None))
        is_latent = bool(sizes.more.get("kv_lora_rank"))  # such attention norms no heads
        if heads is not None and kv_heads is not None and size is not None and not is_latent:
            qkv = _activations(source, tokens, (heads + 2 * kv_heads) * size)
            query = qkv[:, : heads * size].view(tokens, heads, size)
            name = f"{tokens} x {heads} heads of {size}, strided out of qkv"
            yield Sample(
                f"{name}{', large' * source.large}", (query, None, source.normal(size), eps, None)
            )
        for rank, beside in (("q_lora_rank", 0), ("kv_lora_rank", 64)):  # of latent attention
            if width := int(sizes.more.get(rank) or 0):
                latent = _activations(source, tokens, width + beside)[:, :width]
                name = f"{tokens} x {width} of a latent{', large' * source.large}"
                yield Sample(name, (latent, None, source.normal(width), eps, None))


def _activations(source: Source, *shape: int) -> torch.Tensor:
    """Rows of a residual stream. Unless they are large, epsilon matters in every 16th row, and
    every 64th row is zero.
    """
    if source.large:
        return source.spiked(*shape, scale=30.0, peak=peak(source.dtype))
    x = source.normal(*shape)
    x[5::16] *= 1e-3
    x[9::64] = 0.0
    return x


def _layer(weight: torch.Tensor | None, epsilon: float, variance_size: int | None) -> object:
    return SimpleNamespace(
        weight=weight,
        has_weight=weight is not None,
        variance_epsilon=epsilon,
        variance_size_override=variance_size,
    )


def _plain(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> object:
    who = "it is called with the layer (self), and this layer"
    if weight is None:
        return f"{who} has no weight"
    if weight.dtype != x.dtype:
        return f"{who} has a weight of {weight.dtype} for inputs of {x.dtype}"
    if variance_size is not None:
        return f"{who} takes the mean over a part of its features"
    return True


def _fake(x: torch.Tensor, residual: torch.Tensor | None, *_: Any) -> Any:
    normed = x.new_empty(x.shape)
    return normed if residual is None else (normed, x.new_empty(x.shape))


SPEC = contract(
    rms_norm,
    {
        "x": tensor("..., hidden"),
        "residual": like("x").optional(),
        "weight": tensor("hidden", "x", "float32").optional(),
        "epsilon": scalar("value >= 0"),
        "variance_size": integer("1 <= value <= hidden").optional(),
    },
    _fake,
    variants=(
        Variant(
            "", "(Tensor x, Tensor? weight, float epsilon, SymInt? variance_size=None) -> Tensor"
        ),
        Variant(
            "add",
            "(Tensor x, Tensor residual, Tensor? weight, float epsilon, "
            "SymInt? variance_size=None) -> (Tensor, Tensor)",
            overwrites=("x", "residual"),
        ),
    ),
    group="norms",
    samples=_samples,
    served=_served,
    read_whole=frozenset({"weight"}),
    second_form=_by_sums,
    tolerances=rounded(
        float32=(1e-5, "; room for a mean summed in any order and a fast rsqrt"),
        float16=(
            1e-5,
            ": vLLM's native code rounds before and after the weight (2); atol for subnormals "
            "below 6e-5",
        ),
        bfloat16=(1e-5, "; atol as for float32"),
    ),
    from_layer={
        "weight": lambda layer: layer.weight.data if getattr(layer, "has_weight", True) else None,
        "epsilon": lambda layer: layer.variance_epsilon,
        "variance_size": lambda layer: getattr(layer, "variance_size_override", None),
    },
    layer=_layer,
    plain=_plain,
)
