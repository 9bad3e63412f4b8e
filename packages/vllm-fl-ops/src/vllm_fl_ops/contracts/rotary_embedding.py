"""Rotary position embedding of queries and keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.arguments import flag, integers, like, tensor
from vllm_fl.contracts.sampling import Source, positions
from vllm_fl.contracts.spec import ModelSizes, Sample, Tolerance, Variant

from .common import beyond, contract

if TYPE_CHECKING:
    import torch


def rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor,
    rotary_interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate pairs of features (a, b) of each head to (a*c - b*s, b*c + a*s).

    c and s are the rows of cos and sin at the token's position. With half = cos.shape[-1], the
    first 2 * half features of a head rotate and the others are unchanged. Pair i is the features
    (i, i + half) as in GPT-NeoX, or with rotary_interleaved=True (2 * i, 2 * i + 1) as in GPT-J.

    Args:
        query: (tokens, heads, head_size), float32, float16 or bfloat16, of any layout, such as a
            strided view of qkv. A NaN affects only its pair.
        key: (tokens, kv_heads, head_size), of query's dtype and device, of any layout, or None.
        cos, sin: (max_position, half) tables without unit, of query's dtype or float32, on its
            device, 2 * half <= head_size. A layer passes views of its single
            (max_position, 2 * half) cache, which `joint_cos_sin` returns.
        position_ids: (tokens,), int64 or int32, in [0, max_position), in any order.
        rotary_interleaved: which features make a pair.

    Returns:
        (query, key) rotated, contiguous, with unchanged shapes and dtype. The second result is None
        if key is None. The inputs are not modified, unless the implementation may consume query or
        key.

    Raises:
        CallError: an argument violates this contract. A position outside the tables is not checked
            before the call. On an accelerator, it causes a device error or undefined results.

    Source: Su et al., "RoFormer" (arXiv:2104.09864), equation 34; pairings: vLLM's
    `ApplyRotaryEmb`.
    """
    rows = position_ids.long()
    c = cos[rows].double().unsqueeze(1)
    s = sin[rows].double().unsqueeze(1)
    turned = rotated(query, c, s, rotary_interleaved)
    return turned, None if key is None else rotated(key, c, s, rotary_interleaved)


def rotated(x: torch.Tensor, c: torch.Tensor, s: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The pairs of x rotated in fp64, by the cosines c and sines s of each token and pair."""
    turned, half = x.double().clone(), c.shape[-1]
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    a, b = x[..., first].double(), x[..., second].double()
    turned[..., first] = a * c - b * s
    turned[..., second] = b * c + a * s
    return turned


def _by_complex_numbers(*call: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    import torch

    query, key, cos, sin, position_ids, rotary_interleaved = call
    factor = torch.complex(cos.double(), sin.double())[position_ids.long()]
    query = by_complex_numbers(query, factor, rotary_interleaved)
    return query, None if key is None else by_complex_numbers(key, factor, rotary_interleaved)


def by_complex_numbers(x: torch.Tensor, factor: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Multiply the pairs of x by a complex number for each token and pair, for `second_form`."""
    import torch

    rotary = 2 * factor.shape[-1]
    pairs = x[..., :rotary].double().unflatten(-1, (-1, 2) if interleaved else (2, -1))
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    product = torch.complex(*pairs.unbind(-1)) * factor.unsqueeze(1)
    turned = torch.stack((product.real, product.imag), dim=-1)
    turned = (turned if interleaved else turned.transpose(-1, -2)).flatten(-2)
    return torch.cat((turned, x[..., rotary:].double()), dim=-1)


def tables(
    source: Source, max_position: int, rotary: int, *rest: Any, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin as a vLLM layer passes them: views of a cache made by `table`."""
    cache = table(source, max_position, rotary, *rest, **named)
    return cache[:, : rotary // 2], cache[:, rotary // 2 :]


def table(
    source: Source,
    max_position: int,
    rotary: int,
    dtype: torch.dtype | None = None,
    base: float = 10000.0,
) -> torch.Tensor:
    """(max_position, rotary): the cosines of each position, then its sines."""
    import torch

    exponents = torch.arange(0, rotary, 2, dtype=torch.float32, device="cpu") / rotary
    positions = torch.arange(max_position, dtype=torch.float32, device="cpu")
    angles = positions[:, None] * base**-exponents
    cache = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return cache.to(source.device, dtype or source.dtype)


def _positions(source: Source, tokens: int, max_position: int) -> torch.Tensor:
    """Positions that are not in order, and repeat after `max_position` tokens."""
    import torch

    ids = torch.arange(tokens, device=source.device) * 31 + 7
    return ids % max_position


def heads_of_qkv(
    source: Source, tokens: int, heads: int, kv_heads: int, head_size: int, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """query and key as a model passes them: strided views of one qkv buffer."""
    qkv = source.normal(tokens, (heads + 2 * kv_heads) * head_size, scale=scale)
    q, k, _ = qkv.split((heads * head_size, kv_heads * head_size, kv_heads * head_size), dim=-1)
    return q.view(tokens, heads, head_size), k.view(tokens, kv_heads, head_size)


def _samples(source: Source) -> Iterator[Sample]:
    import torch

    cos, sin = tables(source, 64, 128)
    for tokens in (1, 16, 0):
        q, k = heads_of_qkv(source, tokens, 16, 8, 128)
        name = f"{tokens} token{'s' * (tokens != 1)}, strided out of qkv"
        yield Sample(name, (q, k, cos, sin, _positions(source, tokens, 64), False))
    q, k = heads_of_qkv(source, 5, 4, 2, 128)
    at = _positions(source, 5, 64)
    yield Sample("contiguous query and key", (q.contiguous(), k.contiguous(), cos, sin, at, False))
    heads_first = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k))
    yield Sample("heads first in memory", (*heads_first, cos, sin, at, False))
    yield Sample("interleaved", (q, k, cos, sin, at, True))
    yield Sample("key=None", (q, None, cos, sin, at, False))
    yield Sample("key=None, interleaved", (q, None, cos, sin, at, True))
    separate = (cos.clone(), sin.clone())
    yield Sample("cos and sin are separate tensors", (q, k, *separate, at, False))
    yield Sample("int32 positions", (q, k, cos, sin, at.to(torch.int32), False))
    again = torch.tensor([63, 0, 63, 2, 0], device=source.device)
    yield Sample("repeated positions, out of order", (q, k, cos, sin, again, False))
    yield Sample(
        "consecutive positions", (q, k, cos, sin, torch.arange(17, 22, device=source.device), False)
    )
    strided = _positions(source, 10, 64)[::2]
    yield Sample("strided positions", (q, k, cos, sin, strided, False))
    wide = tables(source, 64, 128, torch.float32)
    yield Sample("fp32 tables", (q, k, *wide, at, False))
    part = tables(source, 64, 32)
    for interleaved in (False, True):
        name = "partial rotary" + ", interleaved" * interleaved
        yield Sample(name, (q, k, *part, at, interleaved))
    yield Sample("partial rotary, key=None", (q, None, *part, at, False))
    q, k = heads_of_qkv(source, 3, 2, 1, 256)
    at = _positions(source, 3, 64)
    yield Sample("wide heads", (q, k, *tables(source, 64, 256), at, False))
    q, k = heads_of_qkv(source, 3, 5, 1, 70)
    odd = tables(source, 11, 70)
    for interleaved in (False, True):
        name = "odd sizes" + ", interleaved" * interleaved
        yield Sample(name, (q, k, *odd, _positions(source, 3, 11), interleaved))
    q, k = heads_of_qkv(source, 3, 1, 1, 7)
    yield Sample("odd head_size", (q, k, *tables(source, 8, 6), _positions(source, 3, 8), False))
    q, k = heads_of_qkv(source, 2, 2, 1, 2)
    yield Sample("1 pair", (q, k, *tables(source, 1, 2), _positions(source, 2, 1), False))
    q, k = heads_of_qkv(source, 4, 4, 2, 128)
    q[1, 2, 7], k[3, 1, 100] = float("nan"), float("nan")
    last = torch.tensor([63, 0, 62, 63], device=source.device)
    yield Sample("NaN, at the last position", (q, k, cos, sin, last, False))


def _served(
    source: Source, sizes: ModelSizes, heads: int, kv_heads: int, head_size: int, rotary: int
) -> Iterator[Sample]:
    rank, rope = (int(sizes.more.get(n) or 0) for n in ("kv_lora_rank", "qk_rope_head_dim"))
    scale = 1e3 if source.large else 1.0
    if source.large and str(source.dtype) != "torch.float16":
        scale = 3e4  # beyond fp16's range
    base = 500000.0 if source.large else 10000.0
    cos, sin = tables(source, sizes.max_position, rope or rotary, base=base)
    for tokens in sizes.tokens:
        for interleaved in (False, True):
            if rope:
                q, k = _of_latent(source, tokens, heads, rank, rope, scale)
            else:
                q, k = heads_of_qkv(source, tokens, heads, kv_heads, head_size, scale)
            at = served_positions(source, tokens, sizes.max_position, source.large)
            name = f"{tokens} x {heads}+{k.shape[1]} heads of {k.shape[2]}"
            name += ", interleaved" * interleaved + ", large" * source.large
            yield Sample(name, (q, k, cos, sin, at, interleaved), scale)


def _of_latent(
    source: Source, tokens: int, heads: int, rank: int, rope: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """query and key as latent attention passes them: the ends of wider heads, and of a latent."""
    query = source.normal(tokens, heads, rope + 2 * rope, scale=scale)[..., 2 * rope :]
    return query, source.normal(tokens, 1, rank + rope, scale=scale)[..., rank:]


def served_positions(source: Source, tokens: int, max_position: int, large: bool) -> torch.Tensor:
    """Positions of a batch as in vLLM, including the model's first and last position."""
    import torch

    before = 5  # a single token is in the middle of its prompt
    generator = torch.Generator("cpu").manual_seed(20240302 + large)
    found = positions(tokens + before, max_position, generator)
    return found[before:].clone().to(source.device)  # a separate storage


COS_SIN_TABLE = tensor(
    "max_position, half", "query", "float32", where="half >= 1 and 2 * half <= head_size"
)
"""cos or sin, for some or all of the pairs of a head."""


def _bad(good: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    integers = {name: good[name].long() for name in ("query", "key")}
    yield "query and key of integers", integers
    yield from beyond(good, "position_ids", len(good["cos"]))
    yield "both tables wider than half a head", {n: good[n].repeat(1, 2) for n in ("cos", "sin")}


SPEC = contract(
    rotary_embedding,
    {
        "query": tensor("tokens, heads, head_size"),
        "key": tensor("tokens, kv_heads, head_size", "query").optional(),
        "cos": COS_SIN_TABLE,
        "sin": COS_SIN_TABLE,
        "position_ids": integers("tokens", "0 <= low and high < max_position"),
        "rotary_interleaved": flag(),
    },
    (like("query"), like("key")),
    bad=_bad,
    variants=(
        Variant(
            "",
            "(Tensor query, Tensor key, Tensor cos, Tensor sin, Tensor position_ids, "
            "bool rotary_interleaved=False) -> (Tensor, Tensor)",
            overwrites=("query", "key"),
        ),
        Variant(
            "query",
            "(Tensor query, Tensor cos, Tensor sin, Tensor position_ids, "
            "bool rotary_interleaved=False) -> Tensor",
            pads=True,
            overwrites=("query",),
        ),
    ),
    group="rope",
    samples=_samples,
    served=_served,
    second_form=_by_complex_numbers,
    tolerances={
        "float32": Tolerance(
            1.3e-6,
            1e-5,
            "PyTorch's fp32 default, also vLLM's; atol because the two products cancel, for "
            "samples of unit variance",
        ),
        "float16": Tolerance(
            1e-3,
            5e-3,
            "2 roundings of 2^-11 on the result; atol for the products, up to 5 each, that vLLM's "
            "native code rounds before they cancel (2^-11 * 5 each, doubled for fp32 tables, "
            "which it rounds first)",
        ),
        "bfloat16": Tolerance(
            8e-3, 4e-2, "2 roundings of 2^-8 on the result; atol for the products as for float16"
        ),
    },
)
