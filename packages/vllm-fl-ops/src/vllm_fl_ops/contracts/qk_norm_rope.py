"""RMS norms of query and key heads, fused with their rotary position embedding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.arguments import flag, integer, integers, like, scalar, tensor
from vllm_fl.contracts.sampling import Source, peak
from vllm_fl.contracts.spec import ModelSizes, Sample, Tolerance

from .common import beyond, contract
from .rotary_embedding import rotated, served_positions, table

if TYPE_CHECKING:
    import torch


def qk_norm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    position_ids: torch.Tensor,
    heads: int,
    kv_heads: int,
    epsilon: float,
    rotary_interleaved: bool = False,
) -> torch.Tensor:
    """Normalise, then rotate, the query and key heads of the projection qkv; values are unchanged.

    A head x becomes y = x / sqrt(mean(x**2) + epsilon) * weight, and pairs of features (a, b) of y
    become (a*c - b*s, b*c + a*s). c and s are the two halves of the table's row at the token's
    position. Only the first 2 * half features of y rotate. Pair i is the features (i, i + half) as
    in GPT-NeoX, or with rotary_interleaved=True (2 * i, 2 * i + 1) as in GPT-J.

    Args:
        qkv: (tokens, (heads + kv_heads + n) * head_size), float32, float16 or bfloat16, of any
            layout: the query heads, the key heads, and n more heads, the values. A NaN affects only
            its head.
        q_weight, k_weight: (head_size,), of qkv's dtype or float32, on its device.
        cos_sin_cache: (max_position, 2 * half) table without unit, of qkv's dtype or float32, on
            its device, 2 <= 2 * half <= head_size: the cosines of a position, then its sines.
        position_ids: (tokens,), int64 or int32, in [0, max_position), in any order.
        heads, kv_heads: the number of query and key heads, at least 1 each.
        epsilon: added to the mean of squares, in its units; finite and not negative.
        rotary_interleaved: which features make a pair.

    Returns:
        Contiguous, of qkv's shape, dtype and device. qkv is not modified, unless the implementation
        may consume it. Rounding to qkv's dtype between norm and rotation is allowed.

    Raises:
        CallError: an argument violates this contract. A position outside the table is not checked
            before the call. On an accelerator, it causes a device error or undefined results.

    Source: query-key norm as in Henry et al. (arXiv:2010.04245), with the RMS norm of Zhang and
    Sennrich (arXiv:1910.07467) and the embedding of Su et al. (arXiv:2104.09864), equation 34; in
    this order as in Qwen3's attention (arXiv:2505.09388) and vLLM's `QkNormRopePattern`.
    """
    import torch

    head_size = q_weight.shape[0]
    half = cos_sin_cache.shape[1] // 2
    rows = cos_sin_cache[position_ids.long()].double().unsqueeze(1)
    c, s = rows[..., :half], rows[..., half:]
    result = torch.empty(qkv.shape, dtype=torch.float64, device=qkv.device).copy_(qkv)
    query, key, _ = result.unflatten(-1, (-1, head_size)).tensor_split(
        (heads, heads + kv_heads), dim=1
    )
    for x, weight in ((query, q_weight), (key, k_weight)):
        y = x * (x.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt() * weight.double()
        x.copy_(rotated(y, c, s, rotary_interleaved))
    return result


def _by_parts(*call: Any) -> torch.Tensor:
    """Compute each head separately: divide by its norm, and rotate by complex numbers."""
    import torch

    qkv, q_weight, k_weight, cos_sin_cache, position_ids, *rest = call
    heads, kv_heads, epsilon, rotary_interleaved = rest
    size = q_weight.shape[0]
    cos, sin = cos_sin_cache.double().index_select(0, position_ids.long()).chunk(2, dim=-1)
    factor, rotary = torch.complex(cos, sin), cos_sin_cache.shape[1]
    results = []
    for number, x in enumerate(qkv.double().split(size, dim=-1)):
        if number >= heads + kv_heads:
            results.append(x)
            continue
        weight = (q_weight if number < heads else k_weight).double()
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        y = weight * x / (length**2 / size + epsilon) ** 0.5
        turning, rest = y[:, :rotary], y[:, rotary:]
        pairs = (
            turning.unflatten(-1, (-1, 2))
            if rotary_interleaved
            else torch.stack(turning.chunk(2, dim=-1), dim=-1)
        )
        product = torch.complex(*pairs.unbind(-1)) * factor
        turned = torch.view_as_real(product)
        turned = turned if rotary_interleaved else turned.transpose(-1, -2)
        results.append(torch.cat((turned.flatten(-2), rest), dim=-1))
    return torch.cat(results, dim=-1)


def _weights(
    source: Source, head_size: int, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of query and key: near 1 as in trained models, and different."""
    query, key = source.normal(head_size, scale=0.25), source.normal(head_size, scale=0.25)
    return (query + 1).to(dtype or source.dtype), (key + 0.75).to(dtype or source.dtype)


def _samples(source: Source) -> Iterator[Sample]:
    import torch

    at = torch.arange(16, device=source.device) * 31 % 64

    def sample(
        name: str,
        tokens: int,
        heads: int,
        kv_heads: int,
        head_size: int,
        rotary: int,
        interleaved: bool = False,
        *,
        values: int | None = None,
        scale: float = 1.0,
        epsilon: float = 1e-6,
        wide: torch.dtype | None = None,
    ) -> Sample:
        columns = (heads + kv_heads + (kv_heads if values is None else values)) * head_size
        qkv = source.normal(tokens, columns, scale=scale)
        weights, angles = _weights(source, head_size, wide), table(source, 64, rotary, wide)
        rest = (at[:tokens].clone(), heads, kv_heads, epsilon, interleaved)
        return Sample(name, (qkv, *weights, angles, *rest))

    yield sample("1 token", 1, 4, 2, 64, 64)
    yield sample("16 tokens", 16, 2, 1, 128, 128)
    yield sample("0 tokens", 0, 2, 1, 64, 64)
    yield sample("wide heads, interleaved", 3, 2, 1, 256, 256, True)
    yield sample("half of each head rotates", 5, 3, 1, 128, 64)
    yield sample("a quarter of each head rotates, interleaved", 5, 2, 2, 64, 16, True)
    yield sample("three quarters of each head rotate", 4, 2, 1, 64, 48)
    yield sample("odd sizes", 7, 5, 1, 7, 6, values=2)
    yield sample("fp32 weights and table", 5, 2, 1, 64, 64, wide=torch.float32)
    yield sample("epsilon matters", 4, 2, 1, 64, 64, scale=1e-3, epsilon=1e-5)
    yield sample("squares overflow fp16, no values", 3, 2, 1, 64, 64, values=0, scale=1e3)
    *some, positions, heads, kv_heads, epsilon, interleaved = sample("", 6, 2, 1, 64, 64).args
    buffer = source.normal(6, 4 * 64 + 24)
    strided = torch.stack((positions, positions), dim=1).to(torch.int32)[:, 0]
    rest = (strided, heads, kv_heads, epsilon, interleaved)
    yield Sample(
        "columns of a wider buffer, strided positions", (buffer[:, 8:-16], *some[1:], *rest)
    )
    apart = source.normal(6, 4 * 64, 2)[..., 0]
    yield Sample("features apart", (apart, *some[1:], *rest))
    broken = source.normal(6, 4 * 64)
    broken[1, 7], broken[2, 64 + 40], broken[4, 3 * 64 + 5] = (float("nan"),) * 3
    last = torch.tensor([63, 0, 63, 62, 63, 1], device=source.device)
    rest = (last, heads, kv_heads, epsilon, interleaved)
    yield Sample("NaN, at the last position", (broken, *some[1:], *rest))


def _served(
    source: Source, sizes: ModelSizes, heads: int, kv_heads: int, head_size: int, rotary: int
) -> Iterator[Sample]:
    if sizes.more.get("kv_lora_rank"):  # latent attention norms no heads
        return
    base = 500000.0 if source.large else 10000.0
    angles = table(source, sizes.max_position, rotary, base=base)
    weights, columns = _weights(source, head_size), (heads + 2 * kv_heads) * head_size
    for tokens in sizes.tokens:
        for interleaved in (False, True):
            if source.large:
                qkv = source.spiked(tokens, columns, scale=30.0, peak=peak(source.dtype))
            else:
                qkv = source.normal(tokens, columns)
                qkv[5::16] *= 1e-3  # epsilon matters in these rows
            at = served_positions(source, tokens, sizes.max_position, source.large)
            name = f"{tokens} x {heads}+{kv_heads} heads of {head_size}"
            name += ", interleaved" * interleaved + ", large" * source.large
            args = (qkv, *weights, angles, at, heads, kv_heads, sizes.epsilon, interleaved)
            # The norm turns a peak among features near 0 into sqrt(head_size) at most.
            yield Sample(name, args, head_size**0.5 if source.large else 1.0)


def _bad(good: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "q_weight of float16", {"q_weight": good["q_weight"].half()}
    yield "q_weight of bfloat16", {"q_weight": good["q_weight"].bfloat16()}
    yield from beyond(good, "position_ids", len(good["cos_sin_cache"]))
    yield "a table without halves", {"cos_sin_cache": good["cos_sin_cache"][:, 1:]}
    yield "a table wider than a head", {"cos_sin_cache": good["cos_sin_cache"].repeat(1, 2)}


SPEC = contract(
    qk_norm_rope,
    {
        "qkv": tensor("tokens, columns"),
        "q_weight": tensor(
            "head_size", "qkv", "float32", where="head_size >= 1 and columns % head_size == 0"
        ),
        "k_weight": tensor("head_size", "qkv", "float32"),
        "heads": integer("value >= 1", kind="int"),
        "kv_heads": integer("value >= 1 and columns >= (heads + value) * head_size", kind="int"),
        "cos_sin_cache": tensor(
            "max_position, 2 * half", "qkv", "float32", where="half >= 1 and 2 * half <= head_size"
        ),
        "position_ids": integers("tokens", "0 <= low and high < max_position"),
        "epsilon": scalar("value >= 0"),
        "rotary_interleaved": flag(),
    },
    (like("qkv"),),
    overwrites=("qkv",),
    bad=_bad,
    group="rope",
    samples=_samples,
    served=_served,
    read_whole=frozenset({"q_weight", "k_weight"}),
    second_form=_by_parts,
    tolerances={
        "float32": Tolerance(
            1.3e-6,
            1e-5,
            "PyTorch's fp32 default, also vLLM's; atol because the two products cancel, for "
            "normed features of unit variance",
        ),
        "float16": Tolerance(
            1e-3,
            5e-3,
            "2 roundings of 2^-11 on the result; atol because vLLM's two layers round three times "
            "before the products cancel (normed, weighted, product), at features up to 4 each",
        ),
        "bfloat16": Tolerance(
            8e-3, 4e-2, "2 roundings of 2^-8 on the result; atol for the products as for float16"
        ),
    },
)
