"""Writing the latents of a step into the paged cache of multi-head latent attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.checks import Problem, floating_tensor, on_device_of
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


def concat_and_cache_mla(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> torch.Tensor:
    """The cache with each token's latent and rotated key in the token's slot, all else as it was.

    Slot s is row (s // block_size, s % block_size) of the cache; it holds kv_c, then k_pe. Numbers
    are moved, not changed.

    Args:
        kv_c: (tokens, kv_lora_rank), float32, float16 or bfloat16, of any layout: the normed
            latent of keys and values.
        k_pe: (tokens, rope_size), of kv_c's dtype and device, of any layout: the part of the key
            that was rotated.
        kv_cache: (blocks, block_size, kv_lora_rank + rope_size), of kv_c's dtype and on its device,
            of any layout: rows and blocks may be farther apart than they are long.
        slot_mapping: (tokens,), int64, of any layout, below blocks * block_size. A token whose slot
            is negative (vLLM's -1, for padding) is not written, whatever its row holds. Where two
            tokens have one slot, it is open whose numbers stay there.

    Returns:
        kv_cache after the writes. An implementation that consumes it writes into it and returns it
        itself; it is granted that in an engine. `call_op`, which leaves its caller's arguments
        intact, copies the cache first.

    Raises:
        CallError: an argument is not as said here. A slot beyond the cache is not looked for before
            the call: on an accelerator it is the device's own error, or undefined.

    Source: DeepSeek-AI, "DeepSeek-V2" (arXiv:2405.04434), section 2.1.3, which says what is cached;
    vLLM's `concat_and_cache_mla` with kv_cache_dtype "auto".
    """
    import torch

    return written(kv_cache, torch.cat((kv_c, k_pe), dim=-1), slot_mapping)


def _side_by_side(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> torch.Tensor:
    import torch

    halves = kv_cache.split((kv_c.shape[1], k_pe.shape[1]), dim=-1)
    pairs = zip(halves, (kv_c, k_pe), strict=True)
    return torch.cat([written_one_by_one(*pair, slot_mapping) for pair in pairs], dim=-1)


def _fake(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> torch.Tensor:
    return kv_cache.new_empty(kv_cache.shape)


def _check(kv_c: Any, k_pe: Any, kv_cache: Any, slot_mapping: Any) -> Problem:
    problem = floating_tensor("kv_c", kv_c)
    if problem:
        return problem
    if kv_c.ndim != 2:
        return "kv_c", f"must be (tokens, kv_lora_rank), got {tuple(kv_c.shape)}"
    problem = _check_k_pe(k_pe, kv_c)
    if problem:
        return problem
    row = (kv_c.shape[1] + k_pe.shape[1],)
    return check_cache(
        "kv_cache", kv_cache, row, "kv_lora_rank + rope_size", "kv_c", kv_c
    ) or check_slots(slot_mapping, kv_cache, "kv_c", kv_c)


def _check_k_pe(k_pe: Any, kv_c: torch.Tensor) -> Problem:
    problem = floating_tensor("k_pe", k_pe)
    if problem:
        return problem
    if k_pe.ndim != 2 or k_pe.shape[0] != kv_c.shape[0]:
        return "k_pe", f"must be ({kv_c.shape[0]}, rope_size), got {tuple(k_pe.shape)}"
    if k_pe.dtype != kv_c.dtype:
        return "k_pe", f"must have kv_c's dtype {kv_c.dtype}, got {k_pe.dtype}"
    return on_device_of("k_pe", k_pe, "kv_c", kv_c)


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    import torch

    source = Source(dtype, device)

    def sample(name: str, tokens: int, skipped: int = 0) -> Sample:
        kv_c, k_pe = source.normal(tokens, 64), source.normal(tokens, 16)
        mapping = slots(tokens, 3 * BLOCK_SIZE, device, skipped=skipped)
        return Sample(name, (kv_c, k_pe, source.normal(3, BLOCK_SIZE, 80), mapping))

    yield sample("1 token", 1)
    yield sample("16 tokens", 16)
    yield sample("0 tokens", 0)
    yield sample("every slot of the cache", 48)
    yield sample("every third token skipped", 16, skipped=3)
    yield sample("every token skipped", 5, skipped=1)

    kv_a = source.normal(9, 32 + 64 + 16)
    kv_c, k_pe = kv_a[:, 32:96], kv_a[:, 96:]
    mapping = slots(9, 32, device, skipped=4)
    mapping[0] = -1
    yield Sample("strided out of one projection", (kv_c, k_pe, source.normal(4, 8, 80), mapping))

    wide = source.normal(4, 8, 96)[..., :80]
    mapping = slots(7, 32, device)
    yield Sample("gaps between rows", (source.normal(7, 64), source.normal(7, 16), wide, mapping))
    apart = source.normal(4, 2, 8, 80)[:, 1]
    mapping = slots(7, 32, device)
    yield Sample(
        "gaps between blocks", (source.normal(7, 64), source.normal(7, 16), apart, mapping)
    )

    sparse = source.normal(4, 8, 160)[..., ::2]
    mapping = slots(7, 32, device)
    yield Sample("features apart", (source.normal(7, 64), source.normal(7, 16), sparse, mapping))

    for size in (32, 64, 128):
        cache, mapping = source.normal(3, size, 80), slots(9, 3 * size, device, skipped=4)
        kv_c, k_pe = source.normal(9, 64), source.normal(9, 16)
        yield Sample(f"blocks of {size}", (kv_c, k_pe, cache, mapping))
    blocks, mapping = far_slots(source, 16, BLOCK_SIZE)
    kv_c, k_pe, cache = source.normal(16, 16), source.normal(16, 8), source.normal(blocks, 16, 24)
    yield Sample("slots beyond 16 bits", (kv_c, k_pe, cache, mapping))

    odd = source.normal(4, 5, 43)
    yield Sample(
        "odd sizes", (source.normal(7, 33), source.normal(7, 10), odd, slots(7, 20, device))
    )
    kv_c, k_pe, cache = source.normal(4, 64), source.normal(4, 16), source.normal(2, 4, 80)
    kv_c[0, 3], k_pe[1, 7], cache[1, 2, 5] = float("nan"), float("-inf"), float("inf")
    yield Sample("NaN and infinity", (kv_c, k_pe, cache, slots(4, 8, device)))
    kv_c, k_pe = source.normal(9, 64), source.normal(9, 16)
    mapping = slots(9, 32, device, skipped=3)
    kv_c[mapping < 0], k_pe[mapping < 0] = float("nan"), float("nan")
    yield Sample("NaN in rows of padding", (kv_c, k_pe, source.normal(4, 8, 80), mapping))
    mapping = torch.tensor([31, 0, -1], device=source.device)
    ends = kv_c[:3].clone(), k_pe[:3].clone(), source.normal(4, 8, 80), mapping
    yield Sample("the first slot and the last", ends)


def _served(
    sizes: ModelSizes, dtype: torch.dtype, device: torch.device, large: bool = False
) -> Iterator[Sample]:
    rank, rope = sizes.more.get("kv_lora_rank", 0), sizes.more.get("qk_rope_head_dim", 0)
    if rank is None or rope is None:
        return
    rank, rope = int(rank) or 512, int(rope) or 64  # as all models have it, where none is told
    block = int(sizes.more.get("block_size") or BLOCK_SIZE)
    source = Source(dtype, device, large)
    for tokens in sizes.tokens:
        kv_c = source.normal(tokens, rank)
        if large:
            kv_c = source.spiked(tokens, rank, scale=30.0, peak=peak(dtype))
        k_pe, blocks = source.normal(tokens, rope), blocks_for(tokens, block)
        cache = source.normal(blocks, block, rank + rope)
        mapping = served_slots(tokens, blocks, block, device)
        name = f"{tokens} x {rank} + {rope}, blocks of {block}{', large' * large}"
        yield Sample(name, (kv_c, k_pe, cache, mapping))


def _bad_inputs(dtype: torch.dtype, device: torch.device) -> Iterator[BadInput]:
    import torch

    source = Source(dtype, device)
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16  # as wide, if one is
    good = {
        "kv_c": source.normal(4, 16),
        "k_pe": source.normal(4, 8),
        "kv_cache": source.normal(3, 4, 24),
        "slot_mapping": slots(4, 12, source.device),
    }

    def bad(name: str, argument: str, value: object) -> BadInput:
        return BadInput(name, tuple((good | {argument: value}).values()), argument)

    yield bad("kv_c is not a tensor", "kv_c", [1.0])
    yield bad("kv_c of integers", "kv_c", torch.ones(4, 16, dtype=torch.int64, device=device))
    yield bad("kv_c of three dimensions", "kv_c", source.normal(4, 1, 16))
    yield bad("k_pe is not a tensor", "k_pe", None)
    yield bad("k_pe of fewer tokens", "k_pe", source.normal(1, 8))
    yield bad("k_pe of three dimensions", "k_pe", source.normal(4, 1, 8))
    yield bad("k_pe of another dtype", "k_pe", source.normal(4, 8, dtype=other))
    yield bad("kv_cache is not a tensor", "kv_cache", 0)
    yield bad("kv_cache of wider rows", "kv_cache", source.normal(3, 4, 32))
    yield bad("kv_cache of slots, not blocks", "kv_cache", source.normal(12, 24))
    yield bad("kv_cache of another dtype", "kv_cache", source.normal(3, 4, 24, dtype=other))
    for name, mapping in bad_slots(good["slot_mapping"]):
        yield bad(name, "slot_mapping", mapping)


SPEC = OpSpec(
    oracle=concat_and_cache_mla,
    variants=(
        Variant(
            "",
            "(Tensor kv_c, Tensor k_pe, Tensor kv_cache, Tensor slot_mapping) -> Tensor",
            overwrites=("kv_cache",),
        ),
    ),
    fake=_fake,
    check=_check,
    samples=_samples,
    served=_served,
    by_token=frozenset({"kv_c", "k_pe", "slot_mapping"}),
    bad_inputs=_bad_inputs,
    second_form=_side_by_side,
    consumable=frozenset({"kv_cache"}),
    dtypes=("float32", "float16", "bfloat16"),
    outputs=(Exact(),),
    whole_batch=True,
)
