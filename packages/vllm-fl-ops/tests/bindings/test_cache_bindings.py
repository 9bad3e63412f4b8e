"""Targets of paged caches and of merged attention: calls to the op, and declined calls."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from vllm_fl.contracts.binding import FunctionTarget, OperatorTarget
from vllm_fl.plugins.registry import known_contracts

Op = Callable[..., Any]
ONE, SLOTS = torch.ones(1), torch.tensor([9, 0, 31])


def routes(op: str, call: Op) -> list[Op]:
    """The op as each of its targets calls it."""
    kinds = OperatorTarget | FunctionTarget
    return [p.route(call) for p in known_contracts().bindings[op].targets if isinstance(p, kinds)]


def in_place(key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any) -> Any:
    """An implementation that consumes the caches."""
    for rows, cache in ((key, key_cache), (value, value_cache)):
        cache[slot_mapping // cache.shape[1], slot_mapping % cache.shape[1]] = rows
    return key_cache, value_cache


def step(tokens: int = 3) -> tuple[Any, ...]:
    key, value = torch.randn(2, tokens, 2, 4).unbind(0)
    return key, value, torch.zeros(4, 8, 2, 4), torch.zeros(4, 8, 2, 4)


@pytest.mark.parametrize("route", routes("reshape_and_cache", in_place))
def test_what_was_written_in_place_is_not_copied_and_keys_beyond_the_slots_are_padding(
    route: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache takes most of a device's memory."""
    key, value, key_cache, value_cache = step(5)
    copied: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other: copied.append(self))
    monkeypatch.setattr(torch.Tensor, "clone", lambda self: copied.append(self))
    assert route(key, value, key_cache, value_cache, SLOTS, "auto", ONE, ONE) is None
    assert not copied
    for rows, cache in ((key, key_cache), (value, value_cache)):
        assert torch.equal(cache.flatten(0, 1)[SLOTS], rows[:3])
        assert int((cache != 0).any(-1).any(-1).sum()) == 3


@pytest.mark.parametrize("kind", ["fp8", "fp8_e5m2", "int8_per_token_head", "nvfp4"])
def test_quantised_caches_are_left_to_vllm(kind: str) -> None:
    def never(*args: Any) -> Any:
        raise AssertionError("the op has no scales")

    key, value, key_cache, value_cache = step()
    for route in routes("reshape_and_cache", never):
        heads_first = torch.zeros(4, 2, 1, 8, 4), value_cache
        for caches, how in (
            ((key_cache, value_cache), kind),
            ((key_cache.byte(), value_cache.byte()), "auto"),
            (heads_first, "auto"),
        ):
            assert route(key, value, *caches, SLOTS, how, ONE, ONE) is NotImplemented
    cuda, cpu, method = routes("concat_and_cache_mla", never)
    latent = torch.randn(3, 16), torch.randn(3, 8), torch.zeros(4, 8, 24)
    assert cuda(*latent, SLOTS, kind, ONE) is NotImplemented
    assert cpu(*latent, SLOTS.int()) is NotImplemented
    assert method(None, *latent, SLOTS, kind, ONE) is NotImplemented
    for cache in (latent[2].byte(), torch.empty(0)):  # not created yet
        assert method(None, *latent[:2], cache, SLOTS, "auto", ONE) is NotImplemented


def test_a_latent_is_written_wherever_vllm_does_it() -> None:
    oracle = known_contracts().contracts["concat_and_cache_mla"].oracle
    kv_c, k_pe = torch.randn(5, 16), torch.randn(5, 8)
    slots = torch.tensor([9, -1, 31])
    want = oracle(kv_c[:3], k_pe[:3], torch.zeros(4, 8, 24), slots)
    cuda, cpu, method = routes("concat_and_cache_mla", oracle)
    padded, exact, own = (torch.zeros(4, 8, 24) for _ in range(3))
    cuda(kv_c, k_pe, padded, slots, "auto", ONE)
    cpu(kv_c[:3], k_pe[:3], exact, slots)
    assert method(None, kv_c[:3], k_pe[:3].unsqueeze(1), own, slots, "auto", ONE) is None
    assert torch.equal(padded, want) and torch.equal(exact, want) and torch.equal(own, want)


def test_stock_is_what_attention_on_cpus_without_amx_writes() -> None:
    pytest.importorskip("vllm", reason="vllm is not installed: it has no method to call")
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    target = known_contracts().bindings["concat_and_cache_mla"].targets[-1]
    assert isinstance(target, FunctionTarget)
    latent = torch.randn(3, 16), torch.randn(3, 8), torch.zeros(4, 8, 24)
    slots = torch.tensor([9, -1, 31])
    want = known_contracts().contracts["concat_and_cache_mla"].oracle(*latent, slots)
    got = target.native(CPUMLAImpl.do_kv_cache_update)(*latent, slots)
    assert got is latent[2] and torch.equal(got, want)


def halves(tokens: int = 5) -> list[torch.Tensor]:
    """Outputs and log-sums of two attentions; like in vLLM, the sums have heads first."""
    return [part for _ in range(2) for part in (torch.randn(tokens, 2, 8), torch.randn(2, tokens))]


def merged(*args: Any) -> Any:
    output, lse = known_contracts().contracts["merge_attn_states"].oracle(*args)
    return output.float(), lse.float()


def functions(call: Op) -> list[Op]:
    """The op as vLLM's functions call it."""
    operator, *others = routes("merge_attn_states", call)

    def by_operator(output: Any, p: Any, a: Any, s: Any, b: Any, sums: Any, n: Any, q: Any) -> Any:
        return operator(output, sums, p, a, s, b, n, q)

    def called(function: Op) -> Op:
        def merge(*args: Any) -> Any:
            return function(*args, *[None] * (8 - len(args)))

        return merge

    return [called(function) for function in (by_operator, *others)]


@pytest.mark.parametrize("function", functions(merged))
def test_a_merge_leaves_its_results_where_vllm_wants_them(function: Op) -> None:
    p, a, s, b = halves()
    want, want_sums = merged(p, a.T, s, b.T)
    output, sums = torch.empty(5, 2, 8), torch.empty(2, 5)
    assert function(output, p, a, s, b, sums) is None
    assert torch.equal(output, want) and torch.equal(sums, want_sums.T)
    assert function(p, p, a, s, b, a, 5) is None  # over the prefix itself, as latent attention does
    assert torch.equal(p, want) and torch.equal(a, want_sums.T)
    output.zero_()
    assert function(output, want, want_sums.T, s, b) is None
    assert output.any()


@pytest.mark.parametrize("function", functions(merged))
def test_other_merges_are_left_to_vllm(function: Op) -> None:
    p, a, s, b = halves()
    output, sums = torch.empty(5, 2, 8), torch.empty(2, 5)
    assert function(output, p, a, s, b, sums, 3) is NotImplemented
    assert function(output, p, a, s, b, sums, None, ONE) is NotImplemented
    assert function(output.to(torch.float8_e4m3fn), p, a, s, b, sums) is NotImplemented
    assert function(output, p, torch.randn(2, 8), s, b, sums) is NotImplemented


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllms_own_merge_is_what_stock_means() -> None:
    module = pytest.importorskip("vllm.v1.attention.ops.merge_attn_states")
    own = getattr(module, "_merge_attn_states_torch", None)
    if own is None:
        pytest.skip("this vLLM has no merge in PyTorch")
    *_, target = known_contracts().bindings["merge_attn_states"].targets
    assert isinstance(target, FunctionTarget) and target.name.endswith(own.__name__)
    p, a, s, b = halves()
    for got, want in zip(target.native(own)(p, a.T, s, b.T), merged(p, a.T, s, b.T), strict=True):
        torch.testing.assert_close(got, want)
