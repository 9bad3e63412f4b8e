"""Ascend's attention: each phase against plain softmax attention, and unsupported calls."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_requests import PLAIN, UNSUPPORTED
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_fl_ascend.attention_request import supports_attention
from vllm_fl_ascend.impl import attention, masks

BLOCK = 128
ROOM = 7
"""Blocks per row of the block table."""


@dataclass(frozen=True)
class Case:
    """One step of an engine: (tokens in the cache before it, tokens of the step) per sequence; the
    sliding window, counted as in vLLM; padding tokens after the last sequence."""

    sequences: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    size: int = 64
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    causal: bool = True
    padding: int = 0


PROMPTS = Case(((0, 1), (0, 127), (0, 128), (0, 129), (0, 300)))
DECODE = Case(((1, 1), (127, 1), (128, 1), (129, 1), (700, 1)))
CHUNKS = Case(((200, 77), (1, 255), (384, 130)))
PREFIX = Case(((128, 3), (256, 128), (512, 45)))
MIXED = Case(((0, 150), (300, 1), (64, 100), (128, 1), (0, 1), (5, 7)))

CASES = [
    Case(((0, 5),)),
    PROMPTS,
    DECODE,
    CHUNKS,
    PREFIX,
    MIXED,
    *(dataclasses.replace(MIXED, size=size) for size in (128, 192)),
    *(dataclasses.replace(MIXED, heads=h, kv_heads=kv) for h, kv in ((4, 4), (8, 1), (6, 2))),
    dataclasses.replace(MIXED, dtype=torch.float16),
    *(dataclasses.replace(MIXED, window=window) for window in (1, 2, 100, 128, 1000)),
    *(dataclasses.replace(DECODE, window=window) for window in (1, 129)),
    dataclasses.replace(CHUNKS, window=64),
    dataclasses.replace(MIXED, causal=False),
    dataclasses.replace(DECODE, padding=3),
    dataclasses.replace(CHUNKS, padding=1),
]


@dataclass
class Step:
    """The tensors of one step, and all keys and values of each sequence."""

    query: Tensor
    key: Tensor
    value: Tensor
    cache: Tensor
    common: CommonAttentionMetadata
    keys: list[Tensor]
    values: list[Tensor]

    @property
    def planes(self) -> Tensor:
        """(2, slots, kv_heads, size), a view of the cache."""
        return self.cache.view(2, -1, *self.cache.shape[3:])


def made(case: Case, seed: int = 0) -> Step:
    """A step on a random layout: blocks out of order, old blocks filled with other data."""
    draw = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(case.dtype)

    before = [old for old, _ in case.sequences]
    new = [tokens for _, tokens in case.sequences]
    total = [a + b for a, b in case.sequences]
    count, width = len(total), case.kv_heads
    blocks = count * ROOM + 1  # block 0 belongs to no sequence
    order = torch.randperm(blocks - 1, generator=draw) + 1
    table = order[: count * ROOM].view(count, ROOM).int()
    keys = [noise(n, width, case.size) for n in total]
    values = [noise(n, width, case.size) for n in total]
    cache = noise(2, blocks, BLOCK, width, case.size)
    planes = cache.view(2, -1, width, case.size)
    slots = [
        table[i, torch.arange(n) // BLOCK].long() * BLOCK + torch.arange(n) % BLOCK
        for i, n in enumerate(total)
    ]
    for i, old in enumerate(before):
        planes[0, slots[i][:old]] = keys[i][:old]
        planes[1, slots[i][:old]] = values[i][:old]
    pad = [noise(case.padding, width, case.size)]
    starts = torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32)
    lengths = torch.tensor(total, dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths.to("meta"),  # as on a device: reading it would wait
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=count,
        num_actual_tokens=sum(new),
        max_query_len=max(new),
        max_seq_len=max(total),
        block_table_tensor=table,
        slot_mapping=torch.cat(
            [
                *(s[old:] for s, old in zip(slots, before, strict=True)),
                torch.full((case.padding,), -1),
            ]
        ),
        causal=case.causal,
    )
    return Step(
        noise(sum(new) + case.padding, case.heads, case.size),
        torch.cat([*(k[old:] for k, old in zip(keys, before, strict=True)), *pad]),
        torch.cat([*(v[old:] for v, old in zip(values, before, strict=True)), *pad]),
        cache,
        common,
        keys,
        values,
    )


def expected(case: Case, step: Step) -> Tensor:
    """Softmax attention in fp64, sequence by sequence, from the definition."""
    out = []
    start = 0
    for (before, new), keys, values in zip(case.sequences, step.keys, step.values, strict=True):
        query = step.query[start : start + new].double()
        start += new
        group = case.heads // case.kv_heads
        position = before + torch.arange(new)[:, None]
        other = torch.arange(before + new)[None]
        sees = torch.ones(new, before + new, dtype=torch.bool)
        if case.causal:
            sees &= other <= position
        if case.window is not None:
            sees &= position - other < case.window
        rows = torch.empty_like(query)
        for head in range(case.heads):
            scores = query[:, head] @ keys[:, head // group].double().T * SCALE
            weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
            rows[:, head] = weights @ values[:, head // group].double()
        out.append(rows)
    return torch.cat(out)


SCALE = 0.21
"""Not the usual 1/sqrt(size), to detect a scale from elsewhere."""


def layer(case: Case, **others: Any) -> Any:
    return attention.AscendAttentionImpl(
        case.heads, case.size, SCALE, case.kv_heads, sliding_window=case.window, **others
    )


def metadata(common: CommonAttentionMetadata) -> Any:
    config, cpu = SimpleNamespace(speculative_config=None), torch.device("cpu")
    return attention.AscendMetadataBuilder(None, ["layer"], config, cpu).build(0, common)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_is_attention_over_the_cache(case: Case) -> None:
    """The layer's output is exact up to half a unit in the last place, and the cache is correct."""
    step = made(case)
    want_cache = step.planes.clone()
    written = step.common.slot_mapping >= 0
    slots = step.common.slot_mapping[written]
    for plane, new in zip(want_cache, (step.key, step.value), strict=True):
        plane[slots] = new[written]
    output = torch.full_like(step.query, 7.0)
    tensors = step.query, step.key, step.value, step.cache
    got = layer(case).forward(None, *tensors, metadata(step.common), output)
    assert got is output
    tokens = step.common.num_actual_tokens
    # The emulated kernel computes in fp32 and rounds once: half a unit in the last place.
    eps = torch.finfo(case.dtype).eps
    torch.testing.assert_close(
        output[:tokens].double(), expected(case, step), rtol=0.51 * eps, atol=1e-5
    )
    assert (output[tokens:] == 7.0).all()
    ours = want_cache[:, BLOCK:].view(torch.int16)  # bits: block 0 belongs to no sequence
    assert torch.equal(step.planes[:, BLOCK:].contiguous().view(torch.int16), ours)


def forward(impl: Any, step: Step, cache: Tensor | None = None, **others: Any) -> Tensor:
    cache = step.cache if cache is None else cache
    output = torch.zeros_like(step.query)
    made = metadata(step.common)
    return impl.forward(None, step.query, step.key, step.value, cache, made, output, **others)


def test_slots_of_padding_may_stand_anywhere() -> None:
    step, whole = made(MIXED), made(MIXED)
    forward(layer(MIXED), whole)
    want = whole.cache
    slots = step.common.slot_mapping
    lost = slots[140:150].clone()
    slots[140:150] = -1
    want.view_as(step.planes)[:, lost] = step.planes[:, lost]
    forward(layer(MIXED), step)
    assert torch.equal(step.cache[:, 1:], want[:, 1:])  # block 0 belongs to no sequence


def test_a_step_reads_nothing_from_the_device() -> None:
    step = made(MIXED)
    found = metadata(step.common)  # seq_lens is on meta and cannot be read
    impl = layer(MIXED)
    masks.template(torch.device("cpu"))  # made once, and not in the mode below
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(t) for t in (step.query, step.key, step.value, step.cache)]
        assert impl.forward(None, *fakes, found, torch.empty_like(fakes[0])).shape == fakes[0].shape
        with pytest.raises(DataDependentOutputException):  # raised by a read of seq_lens
            fakes[0].sum().item()


def test_sequences_that_differ_in_causality_are_refused() -> None:
    step = made(CHUNKS)
    with pytest.raises(NotImplementedError, match="some sequences are causal"):
        metadata(step.common.replace(causal=torch.tensor([True, False, True])))


def test_a_layer_that_shares_a_cache_writes_none() -> None:
    step = made(DECODE)
    want = forward(layer(DECODE), step)
    before = step.cache.clone()
    step.key.fill_(9.0)
    sharing = layer(DECODE, kv_sharing_target_layer_name="earlier")
    assert torch.equal(forward(sharing, step), want)
    assert torch.equal(step.cache, before)
    step.key = step.value = None
    assert torch.equal(forward(layer(DECODE), step), want)


def test_a_vllm_that_lets_the_backend_shape_the_cache_gets_that_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = attention.AscendAttentionBackend
    assert backend.get_kv_cache_shape(9, BLOCK, 2, 64) == (2, 9, BLOCK, 2, 64)
    with pytest.raises(ValueError, match=r"needs blocks of 128 tokens, got 64.*--block-size 128"):
        backend.get_kv_cache_shape(9, 64, 2, 64)
    monkeypatch.setattr(attention.AttentionBackend, "get_kv_cache_shape", None, raising=False)
    spec = object()
    assert backend.customize_spec(spec) is spec


def test_keys_and_values_of_two_sizes_are_refused() -> None:
    spec = SimpleNamespace(head_size=192, head_size_v=128)
    with pytest.raises(ValueError, match="got 192 and 128"):
        attention.AscendAttentionBackend.customize_spec(spec)


FORMS = {
    "planes first": torch.zeros(9, 2, 64, 2 * 64).transpose(0, 1).contiguous(),
    "smaller blocks": torch.zeros(2, 9, 64, 2, 64),
    "more heads": torch.zeros(2, 9, BLOCK, 4, 64),
    "blocks first": torch.zeros(9, 2, BLOCK, 2, 64),
    "strided": torch.zeros(9, 2, BLOCK, 2, 64).transpose(0, 1),
    "key beside value": torch.zeros(9, 2, BLOCK, 2 * 64),  # in one row
}


@pytest.mark.parametrize("form", FORMS)
def test_a_cache_of_another_form_is_refused(form: str) -> None:
    cache = FORMS[form].to(torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"in one piece each, in blocks of 128 .*--block-size"):
        forward(layer(DECODE), made(DECODE), cache)


def test_a_quantised_output_is_refused() -> None:
    for scale in ("output_scale", "output_block_scale"):
        with pytest.raises(NotImplementedError, match="quantised output"):
            forward(layer(DECODE), made(DECODE), **{scale: torch.ones(1)})


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"alibi_slopes": [0.5]}, "alibi_slopes"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap=30.0"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8"),
        ({"attn_type": "encoder_only"}, "attn_type=encoder_only"),
        ({"sinks": torch.ones(4)}, "sinks"),
        ({"what_a_later_vllm_adds": True}, "what_a_later_vllm_adds"),
    ],
)
def test_a_layer_that_asks_for_more_is_refused(asked: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotImplementedError, match=f"does not support {reason}"):
        layer(DECODE, **asked)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dtype": torch.float16, "kv_cache_dtype": "float16"},
        {"block_size": None, "kv_cache_dtype": None},
        {"head_size": 64},
        {"head_size": 192},
        {"extras": {}},
        {"extras": {"use_non_causal": True}},
    ],
)
def test_what_the_kernel_can_do_is_taken(change: dict[str, Any]) -> None:
    assert supports_attention(dataclasses.replace(PLAIN, **change)) is True


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        *UNSUPPORTED,
        ({"head_size": 80}, "heads of 80"),
        ({"head_size": 256}, "heads of 256"),
        ({"block_size": 16}, "blocks of 16 tokens: set --block-size 128"),
        ({"block_size": 256}, "blocks of 256"),
        ({"extras": {"use_non_causal": True, "has_sliding_window": True}}, "not causal"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(change: dict[str, Any], reason: str) -> None:
    assert reason in str(supports_attention(dataclasses.replace(PLAIN, **change)))
