"""Contracts of paged caches and of merged attention: wrong forms of them, and their slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from vllm_fl.contracts import contracts
from vllm_fl.engine.verification import misplaced
from vllm_fl.engine.wanted import wanted_of, worst
from vllm_fl_ops.contracts.paging import blocks_for, slots

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Op = Callable[..., Any]


@pytest.mark.parametrize("capacity", [1, 2, 8, 20, 48, 320])
def test_slots_are_tokens_own_scattered_and_below_the_capacity(capacity: int) -> None:
    found = slots(capacity, capacity, CPU)
    assert sorted(found.tolist()) == list(range(capacity))
    assert capacity < 8 or found.tolist() != sorted(found.tolist())
    skipping = slots(capacity, capacity, CPU, skipped=3)
    assert (skipping < 0).nonzero().flatten().tolist() == list(range(2, capacity, 3))


def test_a_sample_has_a_block_to_spare() -> None:
    assert all(blocks_for(tokens) * 16 > tokens for tokens in (1, 300, 319, 320, 8192))
    assert blocks_for(1) == blocks_for(256)


def mutants() -> Iterator[tuple[str, str, Op]]:
    """(op, what is wrong, a wrong form of it): mistakes that kernels of these ops make."""
    write, concat, merge = (
        contracts()[op].oracle
        for op in ("reshape_and_cache", "concat_and_cache_mla", "merge_attn_states")
    )

    def as_packed(cache: torch.Tensor) -> torch.Tensor:
        """What a kernel takes a cache for that does not ask for its strides."""
        return cache.as_strided(cache.shape, torch.empty(cache.shape).stride())

    def modulo(s: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """Negative slots counted from the end, as Python does."""
        return s % (cache.shape[0] * cache.shape[1])

    def first_head(k: Any, v: Any, kc: Any, vc: Any, s: Any) -> Any:
        new = write(k, v, kc, vc, s)
        return tuple(
            torch.cat((n[:, :, :1], c[:, :, 1:]), 2) for n, c in zip(new, (kc, vc), strict=True)
        )

    op = "reshape_and_cache"
    yield op, "nothing written", lambda k, v, kc, vc, s: (kc.clone(), vc.clone())
    yield op, "keys as values", lambda k, v, kc, vc, s: write(k, k, kc, vc, s)
    yield op, "keys and values changed", lambda k, v, kc, vc, s: write(v, k, kc, vc, s)
    yield op, "caches changed", lambda k, v, kc, vc, s: write(k, v, kc, vc, s)[::-1]
    yield op, "the next slot", lambda k, v, kc, vc, s: write(k, v, kc, vc, s.roll(1))
    yield op, "padding written", lambda k, v, kc, vc, s: write(k, v, kc, vc, modulo(s, kc))
    yield op, "padding in slot 0", lambda k, v, kc, vc, s: write(k, v, kc, vc, s.clamp(min=0))
    yield op, "the rest zeroed", lambda k, v, kc, vc, s: write(k, v, kc * 0, vc * 0, s)
    yield (
        op,
        "the last token left out",
        lambda k, v, kc, vc, s: write(k[:-1], v[:-1], kc, vc, s[:-1]),
    )
    yield op, "the first head alone", first_head
    yield (
        op,
        "block and offset changed",
        lambda k, v, kc, vc, s: write(
            k, v, kc, vc, torch.where(s < 0, s, s % kc.shape[0] * kc.shape[1] + s // kc.shape[0])
        ),
    )
    yield (
        op,
        "rows of a strided key read as if packed",
        lambda k, v, kc, vc, s: write(as_packed(k), as_packed(v), kc, vc, s),
    )
    yield (
        op,
        "heads before slots written as if packed",
        lambda k, v, kc, vc, s: (
            as_packed(kc).clone().flatten(0, 1).index_put((s.clamp(min=0),), k).view(kc.shape),
            write(k, v, kc, vc, s)[1],
        ),
    )

    op = "concat_and_cache_mla"
    yield op, "nothing written", lambda c, p, kv, s: kv.clone()
    yield (
        op,
        "the latent alone",
        lambda c, p, kv, s: concat(c, kv.flatten(0, 1)[s][:, -p.shape[1] :], kv, s),
    )
    yield (
        op,
        "the key alone",
        lambda c, p, kv, s: concat(kv.flatten(0, 1)[s][:, : c.shape[1]], p, kv, s),
    )
    yield op, "the key first", lambda c, p, kv, s: concat(p, c, kv, s)
    yield op, "the next slot", lambda c, p, kv, s: concat(c, p, kv, s.roll(1))
    yield op, "padding written", lambda c, p, kv, s: concat(c, p, kv, modulo(s, kv))
    yield op, "padding in slot 0", lambda c, p, kv, s: concat(c, p, kv, s.clamp(min=0))
    yield op, "the rest zeroed", lambda c, p, kv, s: concat(c, p, kv * 0, s)
    yield (
        op,
        "a strided projection read as if packed",
        lambda c, p, kv, s: concat(as_packed(c), p, kv, s),
    )
    yield op, "gaps in the cache not minded", lambda c, p, kv, s: concat(c, p, as_packed(kv), s)

    op = "merge_attn_states"
    yield op, "the mean", lambda p, a, s, b: ((p.double() + s.double()) / 2, merge(p, a, s, b)[1])
    yield op, "the suffix alone", lambda p, a, s, b: (s.double(), b.double())
    yield op, "weights changed", lambda p, a, s, b: merge(p, b, s, a)
    yield op, "sums to the base 2", lambda p, a, s, b: merge(p, a * 0.6931, s, b * 0.6931)
    yield op, "+inf as it is", lambda p, a, s, b: without_care(p, a, s, b)
    yield op, "without the largest taken off", lambda p, a, s, b: overflowing(p, a, s, b)
    yield (
        op,
        "the larger sum",
        lambda p, a, s, b: (merge(p, a, s, b)[0], torch.maximum(a, b).double()),
    )
    yield (
        op,
        "sums read by heads",
        lambda p, a, s, b: merge(p, a.T.reshape(a.shape), s, b.T.reshape(b.shape)),
    )
    yield (
        op,
        "heads read as if packed",
        lambda p, a, s, b: merge(as_packed(p), a, as_packed(s), b),
    )
    yield (
        op,
        "the suffix read by the prefix's strides",
        lambda p, a, s, b: merge(p, a, s.as_strided(s.shape, fitting(s, p)), b),
    )


def fitting(x: torch.Tensor, other: torch.Tensor) -> tuple[int, ...]:
    """The strides of `other`, as far as x's storage has as many elements."""
    reach = sum((n - 1) * step for n, step in zip(other.shape, other.stride(), strict=True))
    return other.stride() if reach < x.untyped_storage().nbytes() // x.itemsize else x.stride()


def without_care(p: torch.Tensor, a: torch.Tensor, s: torch.Tensor, b: torch.Tensor) -> Any:
    most = torch.maximum(a, b)
    x, y = (a - most).exp(), (b - most).exp()
    total = x + y
    return (
        (p.double() * x[..., None] + s.double() * y[..., None]) / total[..., None],
        (total.log() + most).double(),
    )


def overflowing(p: torch.Tensor, a: torch.Tensor, s: torch.Tensor, b: torch.Tensor) -> Any:
    x, y = a.masked_fill(a.isinf(), -1e4).exp(), b.masked_fill(b.isinf(), -1e4).exp()
    total = x + y
    return (
        (p.double() * x[..., None] + s.double() * y[..., None]) / total[..., None],
        total.log().double(),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "wrong", "mutant"), list(mutants()))
def test_samples_tell_a_wrong_op(op: str, wrong: str, mutant: Op, dtype: torch.dtype) -> None:
    spec = contracts()[op]

    def passes(sample: Any) -> bool:
        shapes = spec.fake(*sample.args)
        many = isinstance(shapes, tuple)
        try:
            got = mutant(*sample.args)
        except (IndexError, RuntimeError):  # this sample has nothing that could be read so
            return True
        pairs = zip(got, shapes, strict=True) if many else [(got, shapes)]
        cast = tuple(mine.to(like.dtype) for mine, like in pairs)
        return not worst(cast if many else cast[0], wanted_of(spec, sample))[1]

    assert not all(passes(sample) for sample in spec.samples(dtype, CPU)), wrong


@pytest.mark.parametrize("op", ["reshape_and_cache", "concat_and_cache_mla"])
def test_a_slot_beyond_the_cache_is_the_callers_mistake(op: str) -> None:
    spec = contracts()[op]
    sample = next(s for s in spec.samples(torch.float32, CPU) if s.name == "16 tokens")
    assert spec.check(*sample.args) is None
    beyond = sample.args[-1].clone()
    beyond[3] = 48
    verdict = spec.check(*sample.args[:-1], beyond)
    assert verdict is not None and verdict[0] == "slot_mapping"
    meta = [arg.to("meta") for arg in (*sample.args[:-1], beyond)]
    assert spec.check(*meta) is None


def test_both_caches_come_back_as_they_are_laid_out() -> None:
    """What an implementation has written in place is its result, whatever the layout."""
    from vllm_fl.engine.guarded import guarded

    spec = contracts()["reshape_and_cache"]
    for sample in spec.samples(torch.float32, CPU):
        call = guarded(dict(zip(spec.parameters, sample.args, strict=True)))
        result = (call.arguments["key_cache"], call.arguments["value_cache"])
        shapes = spec.fake(*call.args)
        assert not misplaced(result, shapes, call, {"key_cache", "value_cache"})
        assert "shares memory with" in misplaced(result, shapes, call, ())
