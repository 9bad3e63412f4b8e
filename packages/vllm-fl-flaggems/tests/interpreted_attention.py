"""FlagGems's attention compared with fp64, in child processes, because a wrong access ends one.

    python interpreted_attention.py

Prints a JSON line per case: `case`, `status` (ok, refused, wrong, raised, died) and `reason`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import select
import signal
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import on_interpreter
import torch

from vllm_fl_tools.testing.triton import to_compile

SECONDS = 60
Case = tuple[str, Callable[[], tuple[str, str]]]


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences as (tokens of this step, total tokens), and one layer's sizes."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    window: int | None = None
    soft_cap: float = 0.0


BATCHES = (
    Batch("prefill", ((17, 17), (3, 3))),
    Batch("decode, grouped heads", ((1, 33), (1, 1), (1, 16))),
    Batch("decode, as many key heads", ((1, 33), (1, 5)), kv_heads=4),
    Batch("chunked prefill", ((7, 40), (16, 16))),
    Batch("prefill beside decode", ((1, 50), (20, 20), (1, 3))),
    Batch("heads of 80", ((5, 21),), head_size=80),
    Batch("heads of 128", ((1, 21), (4, 4)), heads=2, kv_heads=1, head_size=128),
    Batch("sliding window", ((9, 60), (30, 30)), window=16),
    Batch("sliding window, decode", ((1, 60), (1, 9)), window=16),
    Batch("soft cap", ((6, 20),), soft_cap=5.0),
)
LAYERS = (
    Batch("grouped heads", ()),
    Batch("as many key heads", (), kv_heads=4),
    Batch("more query heads than a tile has rows", (), heads=40),
    Batch("heads of 72", (), heads=3, kv_heads=1, head_size=72),
    Batch("sliding window", (), window=64),
    Batch("sliding window and soft cap", (), window=64, soft_cap=5.0),
)
DECODED = [
    Batch(name, sequences, heads, kv_heads, head_size=128)
    for name, sequences, heads, kv_heads in (
        ("one sequence", ((1, 700),), 8, 8),
        ("ends of blocks and tiles", ((1, 1), (1, 16), (1, 17), (1, 64), (1, 65), (1, 66)), 24, 8),
        ("a long one next to short ones", ((1, 40), (1, 1500), (1, 2)), 28, 4),
        ("programs share sequences", ((1, 900),) * 5, 8, 8),
    )
]
BLOCK = 16
TOKENS, REQUESTS, LENGTH = 8192, 64, 1024
"""Limits of the engine; all its kernels must be compiled after the first call."""


def attention() -> Iterator[Case]:
    """Batches like in vLLM's scheduler, written into the cache and attended to."""
    # Import vLLM's kernels first: FlagGems would define their operators, which ends the process.
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    import vllm.v1.attention.backends.flash_attn  # noqa: F401

    on_interpreter.register_ops()
    for dtype in (torch.float16, torch.bfloat16):
        for batch in BATCHES:
            yield (
                f"{str(dtype).removeprefix('torch.')}: {batch.name}",
                lambda batch=batch, dtype=dtype: attend(batch, dtype),
            )
    for batch in BATCHES[1:6:2]:
        yield (
            f"laid out by vLLM: {batch.name}",
            lambda batch=batch: attend(batch, torch.bfloat16, laid_out),
        )
    for batch in LAYERS:
        yield f"warm: {batch.name}", lambda batch=batch: warm(batch)
    for batch, dtype in zip(DECODED, itertools.cycle((torch.bfloat16, torch.float16))):
        yield f"decode: {batch.name}", lambda b=batch, d=dtype: attend(b, d, in_rows, decoder(b))
    yield "decode: a block that another sequence completes", completed_block
    yield "decode: other steps", other_steps
    # Key and value in one row, like in vLLM's backends.
    packed = torch.zeros(4, 2, BLOCK, 2 * 64).half()
    yield "refused: packed cache", lambda: refuses(packed, "in one piece each")
    # A block's keys next to its values, like vLLM's layout of our shape for hybrid models.
    strided = torch.zeros(4, 2, BLOCK, 2, 64).half().transpose(0, 1)
    yield "refused: strided cache", lambda: refuses(strided, "in one piece each")
    # More elements than the kernel can index. On meta: elements must not be accessed.
    huge = torch.empty(2, 2**21, BLOCK, 2, 64, dtype=torch.float16, device="meta")
    yield "refused: cache beyond 32 bits", lambda: refuses(huge, "--num-gpu-blocks-override")


def layer(batch: Batch) -> Any:
    from vllm_fl_flaggems.impl.attention import AttentionFLImpl

    sizes = batch.heads, batch.head_size, batch.head_size**-0.5, batch.kv_heads
    return AttentionFLImpl(*sizes, None, batch.window, "auto", batch.soft_cap or None)


SCALES = SimpleNamespace(_k_scale=torch.ones(()), _v_scale=torch.ones(()))


def shaped(batch: Batch, dtype: torch.dtype, blocks: int) -> torch.Tensor:
    """The cache as vLLM up to 0.28 makes it, by the backend's shape."""
    from vllm_fl_flaggems.impl.attention import AttentionFLBackend

    sizes = blocks, BLOCK, batch.kv_heads, batch.head_size
    return torch.empty(AttentionFLBackend.get_kv_cache_shape(*sizes), dtype=dtype)


def laid_out(batch: Batch, dtype: torch.dtype, blocks: int) -> torch.Tensor:
    """The second of two layers, in the layout of later releases, by the backend's spec."""
    from vllm.v1 import kv_cache_interface as interface

    from vllm_fl_flaggems.impl.attention import AttentionFLBackend

    plain = interface.FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=batch.kv_heads, head_size=batch.head_size, dtype=dtype
    )
    spec = AttentionFLBackend.customize_spec(plain)
    assert spec.page_size_bytes == plain.page_size_bytes  # the number of blocks is unchanged
    (layout,) = AttentionFLBackend.supported_kv_cache_layouts()
    layer_stride, block_stride = interface.compute_layout_strides(spec, blocks, 2, layout)[:2]
    raw = torch.zeros(2 * blocks * spec.page_size_bytes, dtype=torch.int8)
    place = interface.KVCacheTensor(raw.numel(), ["first", "second"], layer_stride, block_stride)
    second: torch.Tensor = interface.create_kv_cache_views(raw, spec, blocks, layout, place)[1]
    return second


def attend(
    batch: Batch,
    dtype: torch.dtype,
    made: Callable[..., torch.Tensor] = shaped,
    impl: Any = None,
) -> tuple[str, str]:
    """Fill the cache in two writes (earlier steps, this step) and compare with fp64."""
    torch.manual_seed(0)
    impl = impl or layer(batch)
    lengths = [total for _, total in batch.sequences]
    pages = [-(-total // BLOCK) for total in lengths]
    count = sum(pages) + 2
    cache = made(batch, dtype, count).fill_(float("nan"))
    free = torch.randperm(count).tolist()
    table = torch.zeros(len(pages), max(pages), dtype=torch.int32)
    for row, needed in enumerate(pages):
        table[row, :needed] = torch.tensor([free.pop() for _ in range(needed)])

    width = (batch.heads + 2 * batch.kv_heads) * batch.head_size
    parts: dict[str, list[torch.Tensor]] = {"q": [], "k": [], "v": []}
    slots: list[list[int]] = [[], []]
    rows: list[list[torch.Tensor]] = [[], []]
    for row, (new, total) in enumerate(batch.sequences):
        qkv = torch.randn(total, width).to(dtype)
        at = [int(table[row, i // BLOCK]) * BLOCK + i % BLOCK for i in range(total)]
        for step, part in enumerate((slice(0, total - new), slice(total - new, total))):
            rows[step].append(qkv[part])
            slots[step] += at[part]
        q, k, v = heads_of(qkv, batch)
        parts["q"].append(q[total - new :])
        parts["k"].append(k)
        parts["v"].append(v)
    for step in (0, 1):
        qkv = torch.cat([*rows[step], torch.full((2, width), 7.0, dtype=dtype)])
        where = torch.tensor([*slots[step], -1, -1], dtype=torch.int64)  # padding
        q, k, v = heads_of(qkv, batch)
        impl.do_kv_cache_update(SCALES, k, v, cache, where)
    out = torch.full((len(q), batch.heads, batch.head_size), 3.0, dtype=dtype)
    starts = torch.tensor([0, *(new for new, _ in batch.sequences)]).cumsum(0).int()
    impl.forward(SCALES, q, k, v, cache, metadata(batch, starts, table), out)
    return judge(out, starts, parts, batch)


def in_rows(batch: Batch, dtype: torch.dtype, blocks: int) -> torch.Tensor:
    """The cache as vLLM makes it, with a head's key and value in one row."""
    shape = blocks, BLOCK, batch.kv_heads, 2 * batch.head_size
    return torch.empty(shape, dtype=dtype).transpose(1, 2)


def decoder(batch: Batch) -> Any:
    """The backend's layer, which writes the last step itself, in batches padded as for a graph."""
    from vllm_fl_flaggems.impl.decode_attention import DecodeImpl

    class Decoder(DecodeImpl):  # type: ignore[misc]
        def do_kv_cache_update(self, layer: Any, k: Any, v: Any, cache: Any, slots: Any) -> None:
            self.rows = cache.transpose(1, 2).view(-1, batch.kv_heads, 2 * batch.head_size)
            self.rows[slots[slots >= 0]] = torch.cat((k, v), -1)[slots >= 0]
            self.slots = slots

        def forward(self, *args: Any) -> None:
            *_, cache, given, out = args
            last, more = given.num_actual_tokens, len(self.slots) - given.num_actual_tokens
            padded = dataclasses.replace(
                given,
                num_actual_tokens=last + more,
                slot_mapping=self.slots,
                seq_lens=torch.nn.functional.pad(given.seq_lens, (0, more)),
                block_table=torch.nn.functional.pad(given.block_table, (0, 0, 0, more)),
            )
            wanted = cache.clone()
            for _ in range(2):  # the second call needs the counters as the first found them
                self.rows[self.slots[:last]] = float("nan")
                super().forward(*args[:-2], padded, out)
            assert torch.equal(cache.nan_to_num(9e4), wanted.nan_to_num(9e4))
            assert not out[last:].any()
            out[last:] = 3.0

    size = batch.head_size
    return Decoder(batch.heads, size, size**-0.5, batch.kv_heads, None, None, "auto")


def completed_block() -> tuple[str, str]:
    """Compare a sequence with a prefix that another sequence completes in the same step."""
    batch = Batch("", ((1, 65), (1, 64)), heads=8, kv_heads=8, head_size=128)
    impl, cache = decoder(batch), in_rows(batch, torch.float16, 6).fill_(float("nan"))
    q, k, v = heads_of(torch.randn(65, 24 * 128).half(), batch)
    slots, new = torch.arange(65) + BLOCK, torch.tensor([64, 63])
    for tokens in (torch.arange(63), new):
        impl.do_kv_cache_update(SCALES, k[tokens], v[tokens], cache, slots[tokens])
    given = metadata(batch, torch.arange(3), torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 4, 0]]).int())
    impl.forward(SCALES, q[new], k[new], v[new], cache, given, out := torch.empty(2, 8, 128).half())
    parts = {"q": [q[64:], q[63:64]], "k": [k, k[:64]], "v": [v, v[:64]]}
    return judge(out, torch.arange(3), parts, batch)


def other_steps() -> tuple[str, str]:
    """Whether vLLM's methods write and attend for several tokens, and if the kernel is disabled."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    from vllm_fl_flaggems.impl.decode_attention import DecodeImpl
    from vllm_fl_flaggems.plugin import disable_decode

    calls: list[str] = []
    FlashAttentionImpl.do_kv_cache_update = lambda *given: calls.append("write")
    FlashAttentionImpl.forward = lambda *given: calls.append("attend")
    shared = {"kv_sharing_target_layer_name": "another"}
    for first, change in ((2, {}), (2, shared), (1, {})):
        batch = Batch("", ((first, first), (1, 9)), heads=8, kv_heads=8, head_size=128)
        impl = DecodeImpl(8, 128, 1.0, 8, None, None, "auto", **change)
        q, k, v = heads_of(torch.zeros(first + 1, 24 * 128).half(), batch)
        given = metadata(batch, torch.tensor([0, first, first + 1]), torch.zeros(2, 1).int())
        if first == 1:
            disable_decode([impl, None])
        given.slot_mapping = torch.arange(first + 1)
        impl.forward(SCALES, q, k, v, torch.zeros(4, 8, BLOCK, 256).half(), given, q)
    wrong = calls != ["write", "attend", "attend", "write", "attend"]
    return ("wrong" if wrong else "ok"), str(calls)


def heads_of(qkv: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, ...]:
    """query, key and value as strided views of the projection."""
    size = batch.head_size
    split = qkv.split([batch.heads * size, batch.kv_heads * size, batch.kv_heads * size], dim=-1)
    return tuple(part.view(len(qkv), -1, size) for part in split)


def metadata(batch: Batch, starts: torch.Tensor, table: torch.Tensor) -> Any:
    """vLLM's metadata; the fields of other features are None."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

    lengths = [total for _, total in batch.sequences]
    known = {
        "num_actual_tokens": int(starts[-1]),
        "max_query_len": max(new for new, _ in batch.sequences),
        "query_start_loc": starts,
        "max_seq_len": max(lengths),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "block_table": table,
        "causal": True,
    }
    unset = {field.name: None for field in dataclasses.fields(FlashAttentionMetadata)}
    return FlashAttentionMetadata(**unset | known)


def judge(
    out: torch.Tensor, starts: torch.Tensor, parts: dict[str, list[torch.Tensor]], batch: Batch
) -> tuple[str, str]:
    """Compare with attention in fp64, row by row of the causal triangle."""
    # Three roundings of values of unit size: the probabilities, the sum of products, the result.
    tolerance = {torch.float16: 3e-3, torch.bfloat16: 2.5e-2}[out.dtype]
    worst = 0.0
    for row, (new, total) in enumerate(batch.sequences):
        q, k, v = (parts[name][row].double() for name in "qkv")
        group = batch.heads // batch.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * batch.head_size**-0.5
        if batch.soft_cap:
            scores = batch.soft_cap * (scores / batch.soft_cap).tanh()
        age = torch.arange(total - new, total)[:, None] - torch.arange(total)
        seen = (age >= 0) & (age < (batch.window or total))
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        want = torch.einsum("hqk,khd->qhd", weights, v)
        got = out[starts[row] : starts[row + 1]].double()
        worst = max(worst, float((got - want).abs().nan_to_num(9e9).max()))
    if not (out[starts[-1] :] == 3.0).all():
        return "wrong", "the padding was written"
    status = "ok" if worst <= tolerance else "wrong"
    return status, f"largest error {worst:.2g}, tolerance {tolerance}"


def warm(batch: Batch) -> tuple[str, str]:
    """Whether a first call of two tokens compiles every kernel that later batches need."""
    from vllm_fl_flaggems.impl import attention

    limits = SimpleNamespace(max_num_batched_tokens=TOKENS, max_num_seqs=REQUESTS)
    model = SimpleNamespace(max_model_len=LENGTH)
    config = SimpleNamespace(scheduler_config=limits, model_config=model)
    attention.get_current_vllm_config_or_none = lambda: config
    impl, cold = layer(batch), layer(batch)
    cold._limits = None
    cache = shaped(batch, torch.bfloat16, 4)
    tables = torch.zeros(REQUESTS, LENGTH // BLOCK, dtype=torch.int32)
    draw = random.Random(7)
    batches = [(count, each) for count in (1, 2, 7, REQUESTS) for each in (1, 2, 20, 100)]
    batches += [(1, LENGTH), (8, LENGTH), (3, draw.randrange(1, LENGTH))]

    def step(of: Any, count: int, each: int) -> None:
        total = [min(LENGTH, each + draw.randrange(LENGTH)) for _ in range(count)]
        made = dataclasses.replace(batch, sequences=tuple((each, most) for most in total))
        width = (batch.heads + 2 * batch.kv_heads) * batch.head_size
        q, k, v = heads_of(torch.zeros(count * each, width, dtype=torch.bfloat16), batch)
        starts = torch.arange(0, count * each + 1, each, dtype=torch.int32)
        of.forward(SCALES, q, k, v, cache, metadata(made, starts, tables[:count]), q.contiguous())

    with to_compile(runs=False) as found:
        step(cold, 2, 1)
        few = len(found)
        step(impl, 2, 1)
        before = set(found)
        for count, each in batches:
            step(impl, count, each)
    later = sorted(found - before)
    if later or few != 1 or len(before) == 1:
        return "wrong", f"{few} at first, {len(before)} warm, then {later}"
    return "ok", f"{len(before)} kernels"


def refuses(cache: torch.Tensor, words: str) -> tuple[str, str]:
    """Whether a write into `cache` raises an error that contains `words`."""
    batch = Batch("one token", ((1, 1),))
    token = torch.zeros(1, batch.kv_heads, batch.head_size, dtype=cache.dtype)
    try:
        layer(batch).do_kv_cache_update(SCALES, token, token, cache, torch.tensor([0]))
    except RuntimeError as error:
        return ("ok" if words in str(error) else "wrong"), str(error)
    return "wrong", "it was written"


def forked(cases: Sequence[Case]) -> Iterator[tuple[str, str, str]]:
    """(case, status, reason) of each, from a child process; a new child follows a crash."""
    done = 0
    while done < len(cases):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            for _, run in cases[done:]:
                os.write(writing, (json.dumps(attempt(run)) + "\n").encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            while select.select([pipe], [], [], SECONDS)[0] and (line := pipe.readline()):
                yield (cases[done][0], *json.loads(line))
                done += 1
        if done < len(cases):
            os.kill(child, signal.SIGKILL)  # it may hang
        _, status = os.waitpid(child, 0)
        if done < len(cases):
            code = os.waitstatus_to_exitcode(status)
            yield cases[done][0], "died", f"no answer in {SECONDS} s, or it ended: status {code}"
            done += 1


def attempt(run: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """The result of a case; an exception is a result too."""
    try:
        return run()
    except Exception as error:
        return "raised", f"{type(error).__name__}: {error}"[:2000]


def main() -> None:
    torch.set_num_threads(1)  # threads do not survive a fork
    for _, group in itertools.groupby(attention(), key=lambda case: case[0].rpartition(": ")[0]):
        for name, status, reason in forked(list(group)):
            print(json.dumps({"case": name, "status": status, "reason": reason}), flush=True)


if __name__ == "__main__":
    main()
