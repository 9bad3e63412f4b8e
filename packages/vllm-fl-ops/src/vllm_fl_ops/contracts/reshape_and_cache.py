"""Writing the keys and values of a step into an attention layer's paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.checks import Problem, floating_tensor, on_device_of, shaped
from vllm_fl.contracts.outputs import Exact
from vllm_fl.contracts.sampling import Source, peak
from vllm_fl.contracts.spec import BadInput, ModelSizes, OpSpec, Sample, Variant

from .paging import (
    BLOCK_SIZE,
    bad_slots,
    blocks_for,
    check_cache,
    check_slots,
    far_slots,
    served_slots,
    slots,
    written,
    written_one_by_one,
)

if TYPE_CHECKING:
    import torch

__all__ = ["SPEC"]


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The caches with each token's key and value in the token's slot, all else as it was.

    Slot s is row (s // block_size, s % block_size) of a cache. Numbers are moved, not changed.

    Args:
        key: (tokens, kv_heads, head_size), float32, float16 or bfloat16, of any layout: usually a
            view of the qkv buffer.
        value: of key's shape, dtype and device, of any layout.
        key_cache: (blocks, block_size, kv_heads, head_size), of key's dtype and on its device. Its
            layout is any: one that has heads before slots in memory (HND) is passed as a view, and
            so is one half of a tensor that has keys and values side by side.
        value_cache: of key_cache's shape, dtype and device, of any layout, without an element in
            common with it.
        slot_mapping: (tokens,), int64, of any layout, below blocks * block_size. A token whose slot
            is negative (vLLM's -1, for padding) is not written, whatever its row holds. Where two
            tokens have one slot, it is open whose key and value stay there.

    Returns:
        (key_cache, value_cache) after the writes. An implementation that consumes the caches
        writes into them and returns them themselves; it is granted that in an engine. `call_op`,
        which leaves its caller's arguments intact, copies both caches first.

    Raises:
        CallError: an argument is not as said here. A slot beyond the cache is not looked for before
            the call: on an accelerator it is the device's own error, or undefined.

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention" (arXiv:2309.06180), section 4.2; vLLM's `reshape_and_cache_flash` with
    kv_cache_dtype "auto".
    """
    return written(key_cache, key, slot_mapping), written(value_cache, value, slot_mapping)


def _one_by_one(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        written_one_by_one(key_cache, key, slot_mapping),
        written_one_by_one(value_cache, value, slot_mapping),
    )


def _fake(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    return key_cache.new_empty(key_cache.shape), value_cache.new_empty(value_cache.shape)


def _check(key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any) -> Problem:
    problem = floating_tensor("key", key)
    if problem:
        return problem
    if key.ndim != 3:
        return "key", f"must be (tokens, kv_heads, head_size), got {tuple(key.shape)}"
    row = ("key", key)
    return (
        _check_value(value, key)
        or check_cache("key_cache", key_cache, key.shape[1:], "kv_heads, head_size", *row)
        or check_cache("value_cache", value_cache, key.shape[1:], "kv_heads, head_size", *row)
        or shaped("value_cache", value_cache, key_cache.shape, "key_cache's shape")
        or check_slots(slot_mapping, key_cache, *row)
    )


def _check_value(value: Any, key: torch.Tensor) -> Problem:
    problem = floating_tensor("value", value)
    problem = problem or shaped("value", value, key.shape, "key's shape")
    if problem:
        return problem
    if value.dtype != key.dtype:
        return "value", f"must have key's dtype {key.dtype}, got {value.dtype}"
    return on_device_of("value", value, "key", key)


def _separate(source: Source, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two caches with storages of their own, slots before heads (NHD)."""
    return source.normal(*shape), source.normal(*shape)


def _of_one_tensor(source: Source, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each block of keys before its block of values: (blocks, 2, block_size, heads, head_size)."""
    both = source.normal(shape[0], 2, *shape[1:])
    return both[:, 0], both[:, 1]


def _heads_first(source: Source, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads before slots (HND), each key beside its value: vLLM 0.32's (blocks, heads, block_size,
    2 * head_size)."""
    blocks, size, heads, width = shape
    both = source.normal(blocks, heads, size, 2 * width).transpose(1, 2)
    return both[..., :width], both[..., width:]


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    import torch

    source = Source(dtype, device)

    def sample(name: str, tokens: int, caches: Any = _separate, skipped: int = 0) -> Sample:
        key, value = source.normal(tokens, 2, 32), source.normal(tokens, 2, 32)
        mapping = slots(tokens, 3 * BLOCK_SIZE, device, skipped=skipped)
        return Sample(name, (key, value, *caches(source, 3, BLOCK_SIZE, 2, 32), mapping))

    yield sample("1 token", 1)
    yield sample("16 tokens", 16)
    yield sample("0 tokens", 0)
    yield sample("every slot of the cache", 48)
    yield sample("every third token skipped", 16, skipped=3)
    yield sample("every token skipped", 5, skipped=1)
    yield sample("keys before values in each block", 16, _of_one_tensor, skipped=7)
    yield sample("heads before slots, keys beside values", 16, _heads_first, skipped=7)

    apart = [source.normal(3, 2, BLOCK_SIZE, 32).transpose(1, 2) for _ in range(2)]
    mapping = slots(7, 48, device)
    mapping[0] = -1
    key, value = source.normal(7, 2, 32), source.normal(7, 2, 32)
    yield Sample("heads before slots, the first token skipped", (key, value, *apart, mapping))

    qkv = source.normal(9, (4 + 2 * 2) * 32)
    key, value = (qkv[:, at : at + 64].view(9, 2, 32) for at in (128, 192))
    caches = _separate(source, 4, 8, 2, 32)
    yield Sample("strided out of qkv", (key, value, *caches, slots(9, 32, device, skipped=4)))

    key, value = source.normal(7, 2, 96).split(48, dim=-1)
    key, value = key[..., :32], value[..., :32]
    caches = _separate(source, 4, 8, 2, 32)
    yield Sample("padded heads", (key, value, *caches, slots(7, 32, device)))
    key, value = source.normal(7, 2, 32, 2).unbind(-1)  # features apart, too
    caches = source.normal(4, 8, 2, 32), source.normal(4, 2, 8, 32).transpose(1, 2)
    yield Sample("two layouts", (key, value, *caches, slots(7, 32, device)))
    key, value = source.normal(7, 2, 32), source.normal(7, 2, 32)
    sparse = source.normal(4, 8, 2, 32, 2).unbind(-1)
    yield Sample("features apart", (key, value, *sparse, slots(7, 32, device)))

    for size in (32, 64, 128, 528):  # the last as beside states of linear attention
        key, value = source.normal(9, 2, 32), source.normal(9, 2, 32)
        caches = _separate(source, 3, size, 2, 32)
        mapping = slots(9, 3 * size, device, skipped=4)
        yield Sample(f"blocks of {size}", (key, value, *caches, mapping))
    key, value = source.normal(16, 1, 8), source.normal(16, 1, 8)
    blocks, mapping = far_slots(source, 16, BLOCK_SIZE)
    caches = _separate(source, blocks, BLOCK_SIZE, 1, 8)
    yield Sample("slots beyond 16 bits", (key, value, *caches, mapping))

    key, value = source.normal(7, 3, 33), source.normal(7, 3, 33)
    caches = _separate(source, 4, 5, 3, 33)
    yield Sample("odd sizes", (key, value, *caches, slots(7, 20, device)))

    key, value = source.normal(4, 1, 8), source.normal(4, 1, 8)
    caches = _separate(source, 2, 4, 1, 8)
    key[0, 0, 3], value[1, 0, 7] = float("nan"), float("-inf")
    caches[0][1, 2, 0, 5], caches[1][0, 3, 0, 0] = float("inf"), float("nan")
    yield Sample("NaN and infinity, 1 head", (key, value, *caches, slots(4, 8, device)))
    key, value = source.normal(9, 2, 32), source.normal(9, 2, 32)
    mapping = slots(9, 32, device, skipped=3)
    key[mapping < 0], value[mapping < 0] = float("nan"), float("nan")
    caches = _separate(source, 4, 8, 2, 32)
    yield Sample("NaN in rows of padding", (key, value, *caches, mapping))
    mapping = torch.tensor([31, 0, -1], device=source.device)
    caches = _separate(source, 4, 8, 2, 32)
    yield Sample(
        "the first slot and the last", (key[:3].clone(), value[:3].clone(), *caches, mapping)
    )


def _served(
    sizes: ModelSizes, dtype: torch.dtype, device: torch.device, large: bool = False
) -> Iterator[Sample]:
    heads, width = sizes.kv_heads, sizes.head_size
    if heads is None or width is None or sizes.more.get("kv_lora_rank"):
        return  # latent attention has a cache of another form
    source, block = Source(dtype, device, large), int(sizes.more.get("block_size") or BLOCK_SIZE)
    for tokens in sizes.tokens:
        shape = blocks_for(tokens, block), block, heads, width
        mapping = served_slots(tokens, *shape[:2], device)
        for layout, caches in (("", _of_one_tensor), (", heads before slots", _heads_first)):
            kv = source.normal(tokens, 2 * heads * width)
            if large:
                kv = source.spiked(tokens, 2 * heads * width, scale=30.0, peak=peak(dtype))
            key, value = (half.view(tokens, heads, width) for half in kv.chunk(2, dim=-1))
            name = f"{tokens} x {heads} heads of {width}, blocks of {block}"
            name += f"{layout}{', large' * large}"
            yield Sample(name, (key, value, *caches(source, *shape), mapping.clone()))


def _bad_inputs(dtype: torch.dtype, device: torch.device) -> Iterator[BadInput]:
    import torch

    source = Source(dtype, device)
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16  # as wide, if one is
    good = {
        "key": source.normal(4, 2, 8),
        "value": source.normal(4, 2, 8),
        "key_cache": source.normal(3, 4, 2, 8),
        "value_cache": source.normal(3, 4, 2, 8),
        "slot_mapping": slots(4, 12, source.device),
    }

    def bad(name: str, argument: str, value: object) -> BadInput:
        return BadInput(name, tuple((good | {argument: value}).values()), argument)

    yield bad("key is not a tensor", "key", [1.0])
    yield bad("key of integers", "key", torch.ones(4, 2, 8, dtype=torch.int64, device=device))
    yield bad("key whose heads are not apart", "key", source.normal(4, 16))
    yield bad("value is not a tensor", "value", None)
    yield bad("value that would broadcast", "value", source.normal(4, 1, 8))
    yield bad("value of fewer heads, before others", "value", source.normal(4, 2, 8)[:, :1])
    yield bad("value of fewer tokens", "value", source.normal(3, 2, 8))
    yield bad("value of another dtype", "value", source.normal(4, 2, 8, dtype=other))
    yield bad("key_cache is not a tensor", "key_cache", 0)
    yield bad("key_cache of more heads", "key_cache", source.normal(3, 4, 4, 8))
    yield bad("key_cache of other heads", "key_cache", source.normal(3, 4, 2, 16))
    yield bad("key_cache of slots, not blocks", "key_cache", source.normal(12, 2, 8))
    yield bad("key_cache of another dtype", "key_cache", source.normal(3, 4, 2, 8, dtype=other))
    yield bad("value_cache of fewer blocks", "value_cache", source.normal(2, 4, 2, 8))
    yield bad("value_cache of other blocks", "value_cache", source.normal(4, 3, 2, 8))
    yield bad("value_cache of another dtype", "value_cache", source.normal(3, 4, 2, 8, dtype=other))
    narrow = {"key": source.normal(4, 1, 8), "value": source.normal(4, 1, 8)}
    args = tuple((good | narrow).values())
    yield BadInput("one head, which would broadcast to the cache's", args, "key_cache")
    for name, mapping in bad_slots(good["slot_mapping"]):
        yield bad(name, "slot_mapping", mapping)


SPEC = OpSpec(
    oracle=reshape_and_cache,
    variants=(
        Variant(
            "",
            "(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, "
            "Tensor slot_mapping) -> (Tensor, Tensor)",
            overwrites=("key_cache", "value_cache"),
        ),
    ),
    fake=_fake,
    check=_check,
    samples=_samples,
    served=_served,
    by_token=frozenset({"key", "value", "slot_mapping"}),
    bad_inputs=_bad_inputs,
    second_form=_one_by_one,
    consumable=frozenset({"key_cache", "value_cache"}),
    dtypes=("float32", "float16", "bfloat16"),
    outputs=(Exact(), Exact()),
    whole_batch=True,
)
