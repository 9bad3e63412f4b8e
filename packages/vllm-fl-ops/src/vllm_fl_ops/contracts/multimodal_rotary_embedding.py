"""Rotary position embedding with three positions: in time, height and width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.arguments import Argument, flag, integers, like, tensor
from vllm_fl.contracts.sampling import Source
from vllm_fl.contracts.spec import ModelSizes, Sample

from .common import beyond, contract
from .rotary_embedding import (
    COS_SIN_TABLE,
    by_complex_numbers,
    heads_of_qkv,
    rotated,
    served_positions,
    tables,
)
from .rotary_embedding import SPEC as ROTARY

if TYPE_CHECKING:
    import torch


def multimodal_rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor,
    mrope_section: list[int],
    mrope_interleaved: bool = False,
    rotary_interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate pairs of features (a, b) of each head to (a*c - b*s, b*c + a*s), with three positions.

    c and s of pair i are read at the token's position along the pair's axis. With the sections
    (t, h, w), the first t pairs have axis 0, the next h axis 1, and the last w axis 2. With
    mrope_interleaved=True, pair i has axis 1 if i % 3 is 1 and i < 3 * h, axis 2 if i % 3 is 2 and
    i < 3 * w, and otherwise axis 0. With half = cos.shape[-1], the first 2 * half features of a
    head rotate and the others are unchanged. Pair i is the features (i, i + half) as in GPT-NeoX,
    or with rotary_interleaved=True (2 * i, 2 * i + 1) as in GPT-J.

    Args:
        query: (tokens, heads, head_size), float32, float16 or bfloat16, of any layout, such as a
            strided view of qkv. A NaN affects only its pair.
        key: (tokens, kv_heads, head_size), of query's dtype and device, of any layout.
        cos, sin: (max_position, half) tables without unit, of query's dtype or float32, on its
            device, 2 * half <= head_size. A layer passes views of its single
            (max_position, 2 * half) cache, which `joint_cos_sin` returns.
        position_ids: (tokens, 3), int64 or int32, in [0, max_position), in any order: the positions
            along the axes 0 (time), 1 (height) and 2 (width). A layer passes a transposed
            (3, tokens).
        mrope_section: three numbers of pairs, which add up to half.
        mrope_interleaved: how the axes are assigned to the pairs.
        rotary_interleaved: which features make a pair.

    Returns:
        (query, key) rotated, contiguous, with unchanged shapes and dtype. The inputs are not
        modified.

    Raises:
        CallError: an argument violates this contract. A position outside the tables is not checked
            before the call. On an accelerator, it causes a device error or undefined results.

    Source: Wang et al., "Qwen2-VL" (arXiv:2409.12191), section 2.1, multimodal rotary position
    embedding; the interleaved axes: vLLM's `MRotaryEmbedding`.
    """
    import torch

    pairs = torch.arange(cos.shape[-1], device=query.device)
    time, height, width = mrope_section
    if mrope_interleaved:
        by_height = (pairs % 3 == 1) & (pairs < 3 * height)
        by_width = (pairs % 3 == 2) & (pairs < 3 * width)
    else:
        by_height = (pairs >= time) & (pairs < time + height)
        by_width = pairs >= time + height
    axes = by_height * 1 + by_width * 2
    rows = position_ids.long()[:, axes]
    c = cos[rows, pairs].double().unsqueeze(1)
    s = sin[rows, pairs].double().unsqueeze(1)
    return rotated(query, c, s, rotary_interleaved), rotated(key, c, s, rotary_interleaved)


def _by_complex_numbers(*call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    query, key, cos, sin, position_ids, mrope_section, mrope_interleaved, rotary_interleaved = call
    table = torch.complex(cos.double(), sin.double())
    by_axis = [table[position_ids[:, axis].long()] for axis in range(3)]
    if mrope_interleaved:
        factor = by_axis[0].clone()
        for axis in (1, 2):
            dealt = slice(axis, 3 * mrope_section[axis], 3)
            factor[:, dealt] = by_axis[axis][:, dealt]
    else:
        parts = zip(*(angles.split(list(mrope_section), dim=-1) for angles in by_axis), strict=True)
        factor = torch.cat([part[axis] for axis, part in enumerate(parts)], dim=-1)
    query, key = (by_complex_numbers(x, factor, rotary_interleaved) for x in (query, key))
    return query, key


def _positions(source: Source, tokens: int, max_position: int) -> torch.Tensor:
    """(tokens, 3) positions, each axis in another order; a transposed view, like in layers."""
    import torch

    ids = torch.arange(tokens, device=source.device)
    return torch.stack([(ids * step + 7) % max_position for step in (31, 17, 5)]).t()


def _samples(source: Source) -> Iterator[Sample]:
    import torch

    cos, sin = tables(source, 64, 64)
    section = [8, 12, 12]
    for tokens in (1, 16, 0):
        q, k = heads_of_qkv(source, tokens, 4, 2, 64)
        name = f"{tokens} token{'s' * (tokens != 1)}, strided out of qkv"
        yield Sample(name, (q, k, cos, sin, _positions(source, tokens, 64), section, False, False))
    q, k = heads_of_qkv(source, 5, 4, 2, 64)
    at = _positions(source, 5, 64)
    yield Sample("interleaved axes", (q, k, cos, sin, at, [12, 10, 10], True, False))
    yield Sample(
        "interleaved axes, width ends first", (q, k, cos, sin, at, [16, 10, 6], True, False)
    )
    apart = (q.contiguous(), k.contiguous(), cos.clone(), sin.clone())
    yield Sample("contiguous, cos and sin apart", (*apart, at.contiguous(), section, False, False))
    yield Sample("interleaved pairs", (q, k, cos, sin, at, section, False, True))
    yield Sample("interleaved axes and pairs", (q, k, cos, sin, at, [12, 10, 10], True, True))
    equal = at[:, :1].expand(-1, 3).to(torch.int32)
    yield Sample("int32, one position for all axes", (q, k, cos, sin, equal, section, False, False))
    part = tables(source, 64, 32)
    yield Sample("partial rotary", (q, k, *part, at, [4, 6, 6], False, False))
    wide = tables(source, 64, 64, torch.float32)
    yield Sample("fp32 tables", (q, k, *wide, at, section, False, False))
    yield Sample("heights and widths alone", (q, k, cos, sin, at, [0, 16, 16], False, False))
    image = torch.tensor([[0] * 3, [1] * 3, [1, 1, 2], [1, 2, 1], [3] * 3], device=source.device)
    yield Sample("an image between texts", (q, k, cos, sin, image, section, False, False))
    q, k = heads_of_qkv(source, 3, 5, 1, 38)
    odd = tables(source, 11, 38), _positions(source, 3, 11)
    yield Sample(
        "odd sizes, an axis without pairs", (q, k, *odd[0], odd[1], [12, 7, 0], False, False)
    )
    q, k = heads_of_qkv(source, 4, 4, 2, 64)
    q[1, 2, 7], k[3, 1, 40] = float("nan"), float("nan")
    last = torch.tensor([[63, 63, 63], [0, 63, 0], [63, 0, 1], [2, 63, 62]], device=source.device)
    yield Sample("NaN, at the last position", (q, k, cos, sin, last, section, False, False))


def _served(
    source: Source, sizes: ModelSizes, heads: int, kv_heads: int, head_size: int, rotary: int
) -> Iterator[Sample]:
    import torch

    if sizes.more.get("kv_lora_rank"):  # no such model has latent attention
        return
    scale = 1e3 if source.large else 1.0
    if source.large and str(source.dtype) != "torch.float16":
        scale = 3e4  # beyond fp16's range
    base = 500000.0 if source.large else 10000.0
    cos, sin = tables(source, sizes.max_position, rotary, base=base)
    half = rotary // 2
    section = [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]
    for tokens in sizes.tokens:
        one = served_positions(source, tokens, sizes.max_position, source.large)
        # Layers pass a transposed view. This tensor is not transposed, because verification takes
        # rows in memory as tokens.
        at = torch.stack([one, one // 2, one // 3], dim=-1)
        for interleaved in (False, True):
            q, k = heads_of_qkv(source, tokens, heads, kv_heads, head_size, scale)
            name = f"{tokens} x {heads}+{kv_heads} heads of {head_size}"
            name += ", interleaved axes" * interleaved + ", large" * source.large
            yield Sample(name, (q, k, cos, sin, at, section, interleaved, False), scale)


def _bad(good: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    time, height, width = good["mrope_section"]
    for what, section in (
        ("a section is missing", [time, height]),
        ("sections that leave a pair over", [time, height, width - 1]),
        ("a negative section", [time + 2 * height, -height, width]),
    ):
        yield what, {"mrope_section": section}
    yield from beyond(good, "position_ids", len(good["cos"]))
    yield "four positions a token", {"position_ids": good["position_ids"][:, [0, 1, 2, 0]]}
    tables = {name: good[name].repeat(1, 2) for name in ("cos", "sin")}
    yield (
        "both wider than half a head",
        tables | {"mrope_section": [2 * time, 2 * height, 2 * width]},
    )


SPEC = contract(
    multimodal_rotary_embedding,
    {
        "query": tensor("tokens, heads, head_size"),
        "key": tensor("tokens, kv_heads, head_size", "query"),
        "cos": COS_SIN_TABLE,
        "sin": COS_SIN_TABLE,
        "position_ids": integers("tokens, 3", "0 <= low and high < max_position"),
        "mrope_section": Argument(
            kind="int[]",
            classes=(list, tuple),
            where="len(value) == 3 and all(type(pairs) is int and pairs >= 0 for pairs in value)"
            " and sum(value) == half",
        ),
        "mrope_interleaved": flag(),
        "rotary_interleaved": flag(),
    },
    (like("query"), like("key")),
    bad=_bad,
    group="rope",
    samples=_samples,
    served=_served,
    second_form=_by_complex_numbers,
    tolerances=ROTARY.tolerances,  # the same two products, rounded in the same places
)
