"""Memory that is read and written in place, and unsupported calls: both outside the conformance
kit. The numbers of the CUDA kernels are compared on a GPU (tests/gpu)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from anywhere import on_cpu

from vllm_fl.plugins.registry import known_contracts
from vllm_fl_cuda.impl import cache_writes, linear, merging, normalization, qk_norm_rope
from vllm_fl_cuda.plugin import MODULES, register_ops

IMPLS = on_cpu(register_ops())
CPU = torch.device("cpu")

REFUSED = {
    "rms_norm": {
        *("variance_size", "variance_size, residual", "fp32 weight", "fp32 weight, residual"),
        *("fp32 weight, 300 rows", "fp32 weight, 300 rows, residual"),
    },
    "rotary_embedding": {"cos and sin are separate tensors"},
    "reshape_and_cache": {"features apart", "odd sizes", "two layouts"},
    "concat_and_cache_mla": {"features apart"},
    "merge_attn_states": {"odd sizes"},
    "grouped_topk": {
        *("1 token", "16 tokens", "0 tokens", "odd sizes, plain", "one expert, plain", "ties"),
        *("every group, plain", "groups of two", "many small groups", "every other row of a slice"),
    },  # without a bias
    "qk_norm_rope": {"three quarters of each head rotate", "odd sizes", "fp32 weights and table"},
}
"""Samples that the CUDA kernels do not support; they support every other one."""


@pytest.fixture(autouse=True)
def any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qk_norm_rope, "capability", lambda device: (8, 0))
    monkeypatch.setattr(linear, "capability", lambda device: (8, 9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", sorted(IMPLS))
def test_what_the_kernels_have_no_form_for_is_refused_and_nothing_else(
    op: str, dtype: torch.dtype
) -> None:
    wanted = REFUSED.get(op, set())
    if op in ("linear_fp8", "qk_norm_rope") and dtype is torch.float32:
        wanted = {sample.name for sample in known_contracts().contracts[op].samples(dtype, CPU)}
    elif dtype is torch.float32:
        wanted = {name for name in wanted if "fp32 weight" not in name}
    spec = known_contracts().contracts[op]
    dtype = dtype if str(dtype).removeprefix("torch.") in spec.dtypes else torch.int32
    samples = list(spec.samples(dtype, CPU))
    if op == "linear_fp8":
        wanted |= {s.name for s in samples if any(size % 16 for size in s.args[1].shape)}
    refused = {s.name for s in samples if IMPLS[op].supports(*s.args) is not True}
    assert refused == wanted


def test_what_kernels_would_spoil_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    key, slots = torch.randn(4, 2, 32), torch.arange(4)
    caches = torch.zeros(2, 1, 8, 2, 33)[..., 1:]
    assert "multiples of 16" in IMPLS["reshape_and_cache"].supports(key, key, *caches, slots)
    weight = torch.ones(32).bfloat16()[::2]
    verdict = IMPLS["rms_norm"].supports(torch.zeros(2, 16).bfloat16(), None, weight, 1e-6)
    assert "weight.is_contiguous()" in verdict
    groups = IMPLS["quant_fp8_group"].supports
    assert groups(torch.zeros(2, 1024).half(), 1024) is True
    assert "group_size" in groups(torch.zeros(2, 2048).half(), 2048)
    x, weight = (torch.zeros(rows, 32).to(torch.float8_e4m3fn) for rows in (3, 16))
    product = (x, weight, torch.ones(3, 1), torch.ones(1), "bfloat16")
    assert IMPLS["linear_fp8"].supports(*product) is True
    monkeypatch.setattr(linear, "capability", lambda device: (8, 6))
    assert "8.9" in IMPLS["linear_fp8"].supports(*product)


Calls = list[tuple[Any, ...]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """(kernel, arguments) of each call; no kernel runs."""
    made: Calls = []
    for module in MODULES:
        monkeypatch.setattr(module, "kernel", lambda name: lambda *args: made.append((name, *args)))
    return made


@pytest.mark.parametrize("op", sorted(IMPLS))
def test_no_kernel_is_launched_for_no_tokens(op: str, calls: Calls) -> None:
    for sample in known_contracts().contracts[op].samples(torch.bfloat16, CPU):
        if sample.name.startswith("0 token"):
            IMPLS[op].fn(*sample.args)
    IMPLS["quant_fp8"].fn(torch.zeros(0, 64))  # not a sample: vLLM's form fails there
    assert calls == []


def unaligned(*shape: int) -> torch.Tensor:
    """Contiguous, but two bytes off the kernels' load alignment."""
    return torch.randn(torch.Size(shape).numel() + 1).bfloat16()[1:].view(shape)


def test_vectors_are_loaded_from_aligned_memory_only(calls: Calls) -> None:
    x, residual = unaligned(2, 64), unaligned(2, 64)
    IMPLS["silu_and_mul"].fn(x)
    IMPLS["quick_gelu"].fn(x)
    IMPLS["rms_norm"].fn(x, None, unaligned(64), 1e-6)
    IMPLS["rms_norm"].fn(x, residual, unaligned(64), 1e-6)
    tensors = [a for call in calls for a in call if isinstance(a, torch.Tensor)]
    assert len(tensors) == 2 + 2 + 3 + 3
    assert all(a.data_ptr() % 32 == 0 for a in tensors)


def test_the_heads_of_a_qkv_buffer_are_normed_where_they_lie(calls: Calls) -> None:
    heads = torch.randn(5, 32 * 128).bfloat16()[:, : 16 * 128].view(5, 16, 128)
    out = normalization.rms_norm(heads, None, torch.ones(128).bfloat16(), 1e-6)
    ((_, result, read, *_rest),) = calls
    assert read is heads
    assert result is out
    assert out.is_contiguous()


ROWS = [
    torch.randn(4, 2 * 64)[:, ::2],
    torch.randn(4, 67)[:, :64],
    torch.randn(2, 2, 2, 2, 2, 64)[:, :, :, :, 0],
    torch.randn(64),
]
KEYS = [
    torch.randn(4, 2, 64)[..., ::2],
    torch.randn(4, 2, 40)[..., :32],
    torch.randn(4, 65)[:, 1:].view(4, 2, 32),
    torch.randn(4 * 64 + 1)[1:].view(4, 2, 32),
]


def test_what_the_kernels_would_not_find_is_copied(calls: Calls) -> None:
    for x in ROWS:
        normalization.rms_norm(x, None, None, 1e-6)
        read = calls.pop()[2]
        assert read.ndim == 2 and read.is_contiguous() and torch.equal(read.view(x.shape), x)
    for key in KEYS:
        cache_writes.reshape_and_cache(key, key, *torch.zeros(2, 1, 8, 2, 32), torch.arange(4))
        read = calls.pop()[1]
        assert read.is_contiguous() and not read.data_ptr() % 16 and torch.equal(read, key)


def test_kernels_work_in_place_where_they_can(calls: Calls) -> None:
    x, residual = torch.randn(4, 64), torch.randn(4, 64)
    normed, total = IMPLS["rms_norm"].fn(x, residual, None, 1e-6)
    assert normed is x and total is residual
    query = torch.randn(4, 3 * 64)[:, :128].view(4, 2, 64)
    cos, sin = torch.randn(8, 64).chunk(2, dim=-1)
    turned, none = IMPLS["rotary_embedding"].fn(query, None, cos, sin, torch.arange(4))
    assert turned is query and none is None
    assert calls[-1][2].shape == (4, 128)


def test_keys_are_written_where_the_cache_lies_and_read_where_they_lie(calls: Calls) -> None:
    qkv = torch.randn(5, 4 * 64).bfloat16()
    key, value = (qkv[:, at : at + 64].view(5, 2, 32) for at in (128, 192))
    caches = torch.zeros(3, 2, 16, 64).bfloat16().transpose(1, 2).split(32, dim=-1)
    slots = torch.arange(10)[::2]
    found = cache_writes.reshape_and_cache(key, value, *caches, slots)
    assert all(a is b for a, b in zip(found, caches, strict=True))
    ((_, k, v, kc, vc, s, kind, one, other),) = calls
    assert k is key and v is value and kc is caches[0] and vc is caches[1]
    assert s.is_contiguous() and torch.equal(s, slots) and kind == "auto"
    assert one is other and one.dtype == torch.float32 and one.shape == (1,)


def test_padded_heads_are_merged_where_they_lie(calls: Calls) -> None:
    prefix, suffix = torch.randn(2, 5, 4, 96)[..., :64].unbind(0)
    sums = torch.randn(4, 5)
    merging.merge_attn_states(prefix, sums.T, suffix, torch.randn(5, 4))
    ((_, out, lse, first, first_lse, second, second_lse, context),) = calls
    assert first is prefix and second is suffix and context is None
    assert first_lse.data_ptr() == sums.data_ptr() and second_lse.shape == lse.shape == (4, 5)
    assert out.is_contiguous() and lse.is_contiguous() and second_lse.is_contiguous()
    calls.clear()
    merging.merge_attn_states(prefix, sums.T, suffix.contiguous(), torch.randn(5, 4))
    ((_, _, _, first, _, second, *_),) = calls
    assert first.is_contiguous() and second.is_contiguous()


def normed_heads(**change: Any) -> tuple[Any, ...]:
    """A call of qk_norm_rope: 2 query heads, 1 key head and 1 of values, of 64 features each."""
    size, tokens = change.pop("size", 64), change.pop("tokens", 3)
    good = {
        "qkv": torch.randn(tokens, 4 * size).bfloat16(),
        "q_weight": torch.ones(size).bfloat16(),
        "k_weight": torch.ones(size).bfloat16(),
        "cos_sin_cache": torch.randn(8, size).bfloat16(),
        "position_ids": torch.arange(tokens),
        "heads": 2,
        "kv_heads": 1,
        "epsilon": 1e-6,
        "rotary_interleaved": False,
    }
    return tuple((good | change).values())


def test_heads_are_normed_and_turned_in_their_buffer_by_the_operators_own_order(
    calls: Calls,
) -> None:
    buffer = unaligned(4, 4 * 64)[1:]  # 510 bytes later: not aligned for the kernel's loads
    strided = torch.arange(6, dtype=torch.int32)[::2]
    args = normed_heads(qkv=buffer, position_ids=strided, rotary_interleaved=True)
    result = qk_norm_rope.qk_norm_rope(*args)
    ((name, qkv, *sizes, q_weight, k_weight, table, is_neox, positions),) = calls
    assert name == "fused_qk_norm_rope" and sizes == [2, 1, 1, 64, 1e-6] and is_neox is False
    assert result is qkv and qkv is not buffer and qkv.data_ptr() % 32 == 0
    assert torch.equal(qkv, buffer)
    assert (q_weight, k_weight, table) == (args[1], args[2], args[3])
    assert positions.dtype is torch.int64 and positions.is_contiguous()
    assert positions.tolist() == [0, 2, 4]
    args = normed_heads()
    assert qk_norm_rope.qk_norm_rope(*args) is args[0], "it works in place where it can"


def test_heads_that_the_kernel_would_leave_or_turn_wrongly_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supports = IMPLS["qk_norm_rope"].supports
    assert supports(*normed_heads()) is True
    for width, interleaved, fits in (
        (32, False, True),  # halves 8 threads apart
        (48, False, False),  # 12 threads apart: no thread differs from another by one bit
        (48, True, True),
        (2, False, False),  # half a thread
        (2, True, True),
    ):
        table = torch.randn(8, width).bfloat16()
        asked = normed_heads(cos_sin_cache=table, rotary_interleaved=interleaved)
        assert (supports(*asked) is True) is fits, (width, interleaved)
    monkeypatch.setattr(qk_norm_rope, "capability", lambda device: (7, 5))
    assert "bfloat16" in str(supports(*normed_heads()))
    half = [
        x.half() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for x in normed_heads()
    ]
    assert supports(*half) is True


def test_where_a_warp_takes_several_heads_a_part_of_their_features_is_not_turned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for major, width, interleaved, fits in (
        (9, 32, False, False),
        (9, 64, False, True),
        (9, 32, True, True),
        (8, 32, False, True),
        (10, 32, False, True),
    ):
        monkeypatch.setattr(qk_norm_rope, "capability", lambda device, major=major: (major, 0))
        table = torch.randn(8, width).bfloat16()
        asked = normed_heads(cos_sin_cache=table, rotary_interleaved=interleaved)
        verdict = IMPLS["qk_norm_rope"].supports(*asked)
        assert (verdict is True) is fits
        assert fits or "32 of 64 features rotate" in str(verdict)
