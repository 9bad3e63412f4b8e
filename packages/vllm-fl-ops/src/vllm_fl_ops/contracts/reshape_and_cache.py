"""Writing the keys and values of a step into an attention layer's paged cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The caches with each token's key and value in its slot; all other slots are unchanged.

    Slot s is row (s // block_size, s % block_size) of a cache. Numbers are copied exactly.

    Args:
        key: (tokens, kv_heads, head_size), float32, float16 or bfloat16, of any layout: usually a
            view of the qkv buffer.
        value: of key's shape, dtype and device, of any layout.
        key_cache: (blocks, block_size, kv_heads, head_size), of key's dtype and device, of any
            layout. A cache with heads before slots in memory (HND) is passed as a view, and so is
            one half of a tensor with keys and values next to each other.
        value_cache: of key_cache's shape, dtype and device, of any layout. The caches share no
            element.
        slot_mapping: (tokens,), int64, of any layout, below blocks * block_size. A token with a
            negative slot (vLLM's -1, for padding) is not written, and its row may contain any
            values. If two tokens have the same slot, either may be in it afterwards.

    Returns:
        (key_cache, value_cache) after the writes. An implementation that consumes the caches writes
        into them and returns the same tensors, in an engine and in `call_op`.

    Raises:
        CallError: an argument violates this contract. A slot beyond the cache is not checked before
            the call. On an accelerator, it causes a device error or undefined results.

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention" (arXiv:2309.06180), section 4.2; vLLM's `reshape_and_cache_flash` with
    kv_cache_dtype "auto".
    """
    return written(key_cache, key, slot_mapping), written(value_cache, value, slot_mapping)


def _one_by_one(*call: Any) -> tuple[torch.Tensor, ...]:
    *rows, key_cache, value_cache, slot_mapping = call
    pairs = zip((key_cache, value_cache), rows, strict=True)
    return tuple(written_one_by_one(*pair, slot_mapping) for pair in pairs)


def _separate(source: Source, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two caches with separate storages, slots before heads (NHD)."""
    return source.normal(*shape), source.normal(*shape)


def _of_one_tensor(source: Source, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of (blocks, 2, block_size, heads, head_size): keys before values in each block."""
    both = source.normal(shape[0], 2, *shape[1:])
    return both[:, 0], both[:, 1]


def _heads_first(source: Source, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of vLLM 0.32's (blocks, heads, block_size, 2 * head_size): heads before slots (HND),
    each key next to its value."""
    blocks, size, heads, width = shape
    both = source.normal(blocks, heads, size, 2 * width).transpose(1, 2)
    return both[..., :width], both[..., width:]


def _slots_first(source: Source, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of vLLM 0.33's LBNHC, its first choice: slots before heads (NHD), each key next to its
    value."""
    both = source.normal(*shape[:3], 2 * shape[3])
    return both[..., : shape[3]], both[..., shape[3] :]


def _of_the_second_layer(source: Source, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `_slots_first`, with the pages of all layers, here two, in each block: vLLM 0.33's
    BLNHC."""
    both = source.normal(shape[0], 2, *shape[1:3], 2 * shape[3])[:, 1]
    return both[..., : shape[3]], both[..., shape[3] :]


def _samples(source: Source) -> Iterator[Sample]:
    import torch

    def sample(name: str, tokens: int, caches: Any = _separate, skipped: int = 0) -> Sample:
        key, value = source.normal(tokens, 2, 32), source.normal(tokens, 2, 32)
        mapping = slots(tokens, 3 * SAMPLE_BLOCK_SIZE, source.device, skipped=skipped)
        return Sample(name, (key, value, *caches(source, 3, SAMPLE_BLOCK_SIZE, 2, 32), mapping))

    yield sample("1 token", 1)
    yield sample("16 tokens", 16)
    yield sample("0 tokens", 0)
    yield sample("every slot of the cache", 48)
    yield sample("every third token skipped", 16, skipped=3)
    yield sample("every token skipped", 5, skipped=1)
    yield sample("keys before values in each block", 16, _of_one_tensor, skipped=7)
    yield sample("heads before slots, keys beside values", 16, _heads_first, skipped=7)

    yield sample("slots before heads, keys beside values", 16, _slots_first, skipped=7)
    yield sample("another layer between the blocks", 16, _of_the_second_layer, skipped=7)

    apart = [source.normal(3, 2, SAMPLE_BLOCK_SIZE, 32).transpose(1, 2) for _ in range(2)]
    mapping = slots(7, 48, source.device)
    mapping[0] = -1
    key, value = source.normal(7, 2, 32), source.normal(7, 2, 32)
    yield Sample("heads before slots, the first token skipped", (key, value, *apart, mapping))

    qkv = source.normal(9, (4 + 2 * 2) * 32)
    key, value = (qkv[:, at : at + 64].view(9, 2, 32) for at in (128, 192))
    caches = _separate(source, 4, 8, 2, 32)
    yield Sample(
        "strided out of qkv", (key, value, *caches, slots(9, 32, source.device, skipped=4))
    )

    key, value = source.normal(7, 2, 96).split(48, dim=-1)
    key, value = key[..., :32], value[..., :32]
    caches = _separate(source, 4, 8, 2, 32)
    yield Sample("padded heads", (key, value, *caches, slots(7, 32, source.device)))
    key, value = source.normal(7, 2, 32, 2).unbind(-1)  # and gaps between features
    caches = source.normal(4, 8, 2, 32), source.normal(4, 2, 8, 32).transpose(1, 2)
    yield Sample("two layouts", (key, value, *caches, slots(7, 32, source.device)))
    key, value = source.normal(7, 2, 32), source.normal(7, 2, 32)
    sparse = source.normal(4, 8, 2, 32, 2).unbind(-1)
    yield Sample("features apart", (key, value, *sparse, slots(7, 32, source.device)))

    for size in (32, 64, 128, 528):  # 528 in models with linear attention
        key, value = source.normal(9, 2, 32), source.normal(9, 2, 32)
        caches = _separate(source, 3, size, 2, 32)
        mapping = slots(9, 3 * size, source.device, skipped=4)
        yield Sample(f"blocks of {size}", (key, value, *caches, mapping))
    key, value = source.normal(16, 1, 8), source.normal(16, 1, 8)
    blocks, mapping = far_slots(source, 16, SAMPLE_BLOCK_SIZE)
    caches = _separate(source, blocks, SAMPLE_BLOCK_SIZE, 1, 8)
    yield Sample("slots beyond 16 bits", (key, value, *caches, mapping))

    key, value = source.normal(7, 3, 33), source.normal(7, 3, 33)
    caches = _separate(source, 4, 5, 3, 33)
    yield Sample("odd sizes", (key, value, *caches, slots(7, 20, source.device)))

    key, value = source.normal(4, 1, 8), source.normal(4, 1, 8)
    caches = _separate(source, 2, 4, 1, 8)
    key[0, 0, 3], value[1, 0, 7] = float("nan"), float("-inf")
    caches[0][1, 2, 0, 5], caches[1][0, 3, 0, 0] = float("inf"), float("nan")
    yield Sample("NaN and infinity, 1 head", (key, value, *caches, slots(4, 8, source.device)))
    key, value = source.normal(9, 2, 32), source.normal(9, 2, 32)
    mapping = slots(9, 32, source.device, skipped=3)
    key[mapping < 0], value[mapping < 0] = float("nan"), float("nan")
    caches = _separate(source, 4, 8, 2, 32)
    yield Sample("NaN in rows of padding", (key, value, *caches, mapping))
    mapping = torch.tensor([31, 0, -1], device=source.device)
    caches = _separate(source, 4, 8, 2, 32)
    yield Sample(
        "the first slot and the last", (key[:3].clone(), value[:3].clone(), *caches, mapping)
    )


def _served(source: Source, sizes: ModelSizes, kv_heads: int, head_size: int) -> Iterator[Sample]:
    heads, width = kv_heads, head_size
    if sizes.more.get("kv_lora_rank"):
        return  # latent attention has a cache of another shape
    block = int(sizes.more.get("block_size") or SAMPLE_BLOCK_SIZE)
    for tokens in sizes.tokens:
        shape = blocks_for(tokens, block), block, heads, width
        mapping = served_slots(tokens, *shape[:2], source.device)
        for layout, caches in (
            ("", _of_one_tensor),
            (", heads before slots", _heads_first),
            (", keys beside values", _slots_first),
        ):
            kv = activations(source, tokens, 2 * heads * width, scale=30.0)
            key, value = (half.view(tokens, heads, width) for half in kv.chunk(2, dim=-1))
            name = f"{tokens} x {heads} heads of {width}, blocks of {block}"
            name += f"{layout}{', large' * source.large}"
            yield Sample(name, (key, value, *caches(source, *shape), mapping.clone()))


def _bad(good: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    heads = {name: good[name][:, :1] for name in ("key", "value")}
    yield "one head, which would broadcast to the cache's", heads
    yield "key_cache of slots, not blocks", {"key_cache": good["key_cache"].flatten(0, 1)}
    blocks = good["value_cache"]
    yield "value_cache of other blocks", {"value_cache": blocks.view(-1, 4, *blocks.shape[2:])}


SPEC = contract(
    reshape_and_cache,
    {
        "key": tensor("tokens, kv_heads, head_size"),
        "value": like("key"),
        "key_cache": tensor(
            "blocks, block_size, kv_heads, head_size", "key", where="block_size >= 1"
        ),
        "value_cache": like("key_cache"),
        "slot_mapping": SLOTS,
    },
    (like("key_cache"), like("value_cache")),
    overwrites=("key_cache", "value_cache"),
    bad=_bad,
    group="cache",
    samples=_samples,
    served=_served,
    second_form=_one_by_one,
    dtypes=("float32", "float16", "bfloat16"),
    outputs=(Exact(), Exact()),
    whole_batch=True,
    ignores_repeats=True,  # repeats write the same numbers
)
