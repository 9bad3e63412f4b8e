"""Writing the latents of a step into the paged cache of multi-head latent attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.arguments import like, tensor
from vllm_fl.contracts.outputs import Exact
from vllm_fl.contracts.sampling import Source
from vllm_fl.contracts.spec import ModelSizes, Sample

from .common import activations, contract
from .paging import (
    SAMPLE_BLOCK_SIZE,
    SLOTS,
    blocks_for,
    far_slots,
    served_slots,
    slots,
    written,
    written_one_by_one,
)

if TYPE_CHECKING:
    import torch


def concat_and_cache_mla(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> torch.Tensor:
    """The cache with each token's latent and rotated key in its slot; all other slots are
    unchanged.

    Slot s is row (s // block_size, s % block_size) of the cache; it has kv_c, then k_pe. Numbers
    are copied exactly.

    Args:
        kv_c: (tokens, kv_lora_rank), float32, float16 or bfloat16, of any layout: the normalised
            latent of keys and values.
        k_pe: (tokens, rope_size), of kv_c's dtype and device, of any layout: the rotated part of
            the key.
        kv_cache: (blocks, block_size, kv_lora_rank + rope_size), of kv_c's dtype and device, of any
            layout: there may be gaps between rows and between blocks.
        slot_mapping: (tokens,), int64, of any layout, below blocks * block_size. A token with a
            negative slot (vLLM's -1, for padding) is not written, and its row may contain any
            values. If two tokens have the same slot, either may be in it afterwards.

    Returns:
        kv_cache after the writes. An implementation that consumes kv_cache writes into kv_cache and
        returns the same tensor, in an engine and in `call_op`.

    Raises:
        CallError: an argument violates this contract. A slot beyond the cache is not checked before
            the call. On an accelerator, it causes a device error or undefined results.

    Source: DeepSeek-AI, "DeepSeek-V2" (arXiv:2405.04434), section 2.1.3, on the cached numbers;
    vLLM's `concat_and_cache_mla` with kv_cache_dtype "auto".
    """
    import torch

    return written(kv_cache, torch.cat((kv_c, k_pe), dim=-1), slot_mapping)


def _side_by_side(*call: Any) -> torch.Tensor:
    import torch

    kv_c, k_pe, kv_cache, slot_mapping = call
    halves = kv_cache.split((kv_c.shape[1], k_pe.shape[1]), dim=-1)
    pairs = zip(halves, (kv_c, k_pe), strict=True)
    return torch.cat([written_one_by_one(*pair, slot_mapping) for pair in pairs], dim=-1)


def _samples(source: Source) -> Iterator[Sample]:
    import torch

    def sample(name: str, tokens: int, skipped: int = 0) -> Sample:
        kv_c, k_pe = source.normal(tokens, 64), source.normal(tokens, 16)
        mapping = slots(tokens, 3 * SAMPLE_BLOCK_SIZE, source.device, skipped=skipped)
        return Sample(name, (kv_c, k_pe, source.normal(3, SAMPLE_BLOCK_SIZE, 80), mapping))

    yield sample("1 token", 1)
    yield sample("16 tokens", 16)
    yield sample("0 tokens", 0)
    yield sample("every slot of the cache", 48)
    yield sample("every third token skipped", 16, skipped=3)
    yield sample("every token skipped", 5, skipped=1)

    kv_a = source.normal(9, 32 + 64 + 16)
    kv_c, k_pe = kv_a[:, 32:96], kv_a[:, 96:]
    mapping = slots(9, 32, source.device, skipped=4)
    mapping[0] = -1
    yield Sample("strided out of one projection", (kv_c, k_pe, source.normal(4, 8, 80), mapping))

    wide = source.normal(4, 8, 96)[..., :80]
    mapping = slots(7, 32, source.device)
    yield Sample("gaps between rows", (source.normal(7, 64), source.normal(7, 16), wide, mapping))
    apart = source.normal(4, 2, 8, 80)[:, 1]
    mapping = slots(7, 32, source.device)
    yield Sample(
        "gaps between blocks", (source.normal(7, 64), source.normal(7, 16), apart, mapping)
    )

    sparse = source.normal(4, 8, 160)[..., ::2]
    mapping = slots(7, 32, source.device)
    yield Sample("features apart", (source.normal(7, 64), source.normal(7, 16), sparse, mapping))

    for size in (32, 64, 128):
        cache, mapping = source.normal(3, size, 80), slots(9, 3 * size, source.device, skipped=4)
        kv_c, k_pe = source.normal(9, 64), source.normal(9, 16)
        yield Sample(f"blocks of {size}", (kv_c, k_pe, cache, mapping))
    blocks, mapping = far_slots(source, 16, SAMPLE_BLOCK_SIZE)
    kv_c, k_pe, cache = source.normal(16, 16), source.normal(16, 8), source.normal(blocks, 16, 24)
    yield Sample("slots beyond 16 bits", (kv_c, k_pe, cache, mapping))

    odd = source.normal(4, 5, 43)
    yield Sample(
        "odd sizes", (source.normal(7, 33), source.normal(7, 10), odd, slots(7, 20, source.device))
    )
    kv_c, k_pe, cache = source.normal(4, 64), source.normal(4, 16), source.normal(2, 4, 80)
    kv_c[0, 3], k_pe[1, 7], cache[1, 2, 5] = float("nan"), float("-inf"), float("inf")
    yield Sample("NaN and infinity", (kv_c, k_pe, cache, slots(4, 8, source.device)))
    kv_c, k_pe = source.normal(9, 64), source.normal(9, 16)
    mapping = slots(9, 32, source.device, skipped=3)
    kv_c[mapping < 0], k_pe[mapping < 0] = float("nan"), float("nan")
    yield Sample("NaN in rows of padding", (kv_c, k_pe, source.normal(4, 8, 80), mapping))
    mapping = torch.tensor([31, 0, -1], device=source.device)
    ends = kv_c[:3].clone(), k_pe[:3].clone(), source.normal(4, 8, 80), mapping
    yield Sample("the first slot and the last", ends)


def _served(source: Source, sizes: ModelSizes) -> Iterator[Sample]:
    rank, rope = sizes.more.get("kv_lora_rank", 0), sizes.more.get("qk_rope_head_dim", 0)
    if rank is None or rope is None:
        return
    rank, rope = int(rank) or 512, int(rope) or 64  # all models have these sizes
    block = int(sizes.more.get("block_size") or SAMPLE_BLOCK_SIZE)
    for tokens in sizes.tokens:
        kv_c = activations(source, tokens, rank, scale=30.0)
        k_pe, blocks = source.normal(tokens, rope), blocks_for(tokens, block)
        cache = source.normal(blocks, block, rank + rope)
        mapping = served_slots(tokens, blocks, block, source.device)
        name = f"{tokens} x {rank} + {rope}, blocks of {block}{', large' * source.large}"
        yield Sample(name, (kv_c, k_pe, cache, mapping))


SPEC = contract(
    concat_and_cache_mla,
    {
        "kv_c": tensor("tokens, kv_lora_rank"),
        "k_pe": tensor("tokens, rope_size", "kv_c"),
        "kv_cache": tensor(
            "blocks, block_size, kv_lora_rank + rope_size", "kv_c", where="block_size >= 1"
        ),
        "slot_mapping": SLOTS,
    },
    (like("kv_cache"),),
    overwrites=("kv_cache",),
    group="cache",
    samples=_samples,
    served=_served,
    second_form=_side_by_side,
    dtypes=("float32", "float16", "bfloat16"),
    outputs=(Exact(),),
    whole_batch=True,
    ignores_repeats=True,  # repeats write the same numbers
)
