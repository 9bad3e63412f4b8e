"""The gated delta rule for one token of each sequence: linear attention in decode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.arguments import Problem, integers, like, scalar, tensor
from vllm_fl.contracts.outputs import Within
from vllm_fl.contracts.sampling import Source
from vllm_fl.contracts.spec import Sample, Tolerance

from .chunk_gated_delta_rule import DELTA_RULE_HEADS, OUTPUTS, normed, qkv, served_heads
from .common import beyond, contract
from .gdn_gating import SPEC as GATING
from .sequences import OF_SEQUENCES, sample, slots, state_slots

if TYPE_CHECKING:
    import torch


def recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    state_indices: torch.Tensor,
    epsilon: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of each token, and the cache with the states after the tokens.

    S is the state of the token's sequence, (value_size, key_size) for each head. g and beta are the
    results of `gdn_gating` for a, b, A_log and dt_bias, but not rounded.

    S = exp(g) * S; S = S + beta * (v - S k) k^T; out = S q / sqrt(key_size).

    Args:
        q, k: (tokens, heads, key_size), float32, float16 or bfloat16, of any layout. Each token is
            from a different sequence.
        v: (tokens, value_heads, value_size), of q's dtype, of any layout; value_heads is a multiple
            of heads. value_heads / heads consecutive heads of v share a head of q and k.
        a, b: (tokens, value_heads), of q's dtype, of any layout.
        A_log, dt_bias: (value_heads,), of q's dtype or float32.
        state: (slots, value_heads, value_size, key_size), of q's dtype or float32. Each slot is
            contiguous; there may be gaps between slots.
        state_indices: (tokens,), int32 or int64, distinct except 0: the slots of the tokens'
            sequences. A token with slot 0 is padding. Slot 0 is vLLM's null block, and is not used
            by a sequence. Padding tokens and the null block may contain NaN, which affects nothing
            else.
        epsilon: None uses q and k unchanged; the state then grows without bound if a k is longer
            than 1. A number above 0 divides each row x of q and k by sqrt(sum(x**2) + epsilon)
            first.

    Returns:
        (out, state). `out` has v's shape and dtype, and is contiguous; it is 0 for a padding token.
        state has the argument's shape and dtype, with the slots of the tokens written. All other
        slots, including slot 0, are unchanged. The inputs are not modified, except state if the
        implementation consumes it: it then returns the same tensor.

    Raises:
        CallError: an argument violates this contract. state_indices is not checked before the call.
            On an accelerator, incorrect values cause a device error or undefined results.

    Source: Yang et al., "Gated Delta Networks" (arXiv:2412.06464), equation 10.
    """
    import torch

    g, beta = GATING.oracle(a.double(), b.double(), A_log, dt_bias)
    q, k = _normed(q, k, v, epsilon)
    rows = state_indices.long()
    kept = state.double()[rows] * g.exp()[..., None, None]
    missing = v.double() - (kept * k[:, :, None]).sum(-1)
    after = kept + (beta[..., None] * missing)[..., None] * k[:, :, None]
    out = (after * q[:, :, None]).sum(-1)
    real = rows != 0
    states = state.double().clone()
    states[rows[real]] = after[real]
    return torch.where(real[:, None, None], out, 0.0), states


def _normed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, epsilon: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k in fp64, repeated for each head of v; q is scaled."""
    q, k = q.double(), k.double()
    if epsilon is not None:
        q, k = (x / (x.pow(2).sum(-1, keepdim=True) + epsilon).sqrt() for x in (q, k))
    share = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(share, dim=1) for x in (q / q.shape[-1] ** 0.5, k))
    return q, k


def _by_matrices(*call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """S (alpha (I - beta k k^T)) + beta v k^T, token by token."""
    import torch

    q, k, v, a, b, A_log, dt_bias, state, state_indices, epsilon = call
    second: Any = GATING.second_form
    g, beta = second(a.double(), b.double(), A_log, dt_bias)
    q, k = _normed(q, k, v, epsilon)
    states, out = state.double().clone(), torch.zeros_like(v, dtype=torch.float64)
    eye = torch.eye(k.shape[-1], dtype=torch.float64, device=k.device)
    for token, slot in enumerate(state_indices.tolist()):
        if slot:
            key, strength = k[token].unsqueeze(-1), beta[token][:, None, None]
            turn = g[token].exp()[:, None, None] * (eye - strength * key @ key.mT)
            taken = strength * v[token].double().unsqueeze(-1) @ key.mT
            states[slot] = states[slot] @ turn + taken
            out[token] = (states[slot] @ q[token].unsqueeze(-1)).squeeze(-1)
    return out, states


def _call(
    source: Source,
    tokens: int,
    heads: int = 2,
    value_heads: int = 2,
    key_size: int = 32,
    value_size: int = 32,
) -> dict[str, Any]:
    import torch

    fp32 = torch.float32
    heads_of_qkv = qkv(source, tokens, heads, value_heads, key_size, value_size)
    b, a = source.normal(tokens, 2 * value_heads).chunk(2, dim=-1)  # views of one projection
    slots = tokens + 3
    return {
        **heads_of_qkv,
        "a": a,
        "b": b,
        "A_log": source.normal(value_heads, dtype=fp32).abs(),
        "dt_bias": source.normal(value_heads),
        "state": source.normal(slots, value_heads, value_size, key_size, scale=0.5, dtype=fp32),
        "state_indices": state_slots(tokens, source.device),
        "epsilon": 1e-6,
    }


def _samples(source: Source) -> Iterator[Sample]:
    import torch

    for tokens in (16, 1, 0):
        name = f"{tokens} token{'s' * (tokens != 1)}"
        yield sample(name, _call(source, tokens))
    yield sample("more than 64 tokens", _call(source, 70, 1, 1, 16, 8))
    padded = _call(source, 6, value_heads=4)
    padded["state_indices"][3:] = 0
    yield sample("padding", padded)
    before = normed(_call(source, 3, 1, 2, 128, 128))
    yield sample("normed before, heads of 128", before)
    yield sample("other sizes of keys and values", _call(source, 5, 1, 3, 64, 16))
    of_q = _call(source, 4)
    of_q["state"] = of_q["state"].to(source.dtype)
    yield sample("states in the dtype of q", of_q)
    paged = _call(source, 4)
    wide = paged["state"].flatten(1)
    page = torch.cat((wide, torch.zeros_like(wide[:, :40])), dim=1)
    paged["state"] = page[:, :-40].unflatten(1, paged["state"].shape[1:])
    yield sample("states with a gap between", paged)
    wide_gates = _call(source, 3, value_heads=4)
    wide_gates["dt_bias"] = wide_gates["dt_bias"].to(torch.float32)
    wide_gates["state_indices"] = wide_gates["state_indices"].long()
    yield sample("dt_bias in float32, int64 indices", wide_gates)
    yield sample("large epsilon", _call(source, 5), epsilon=30.0)
    stale = _call(source, 6, value_heads=4)
    stale["state_indices"][3:] = 0
    stale["state"][0] = float("nan")
    for name in "qkvab":
        stale[name][4:] = float("nan")
    yield sample("NaN in padding", stale)
    broken = _call(source, 5)
    broken["v"][2, 1, 7] = float("nan")
    yield sample("NaN in a token", broken)


def _also(*args: Any) -> Problem:
    *_, state, indices, _ = args
    return slots("state_indices", indices, len(state))


def _bad(good: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from beyond(good, "state_indices", len(good["state"]))
    for few in (1, 2):
        yield f"a and b of {few}", {name: good[name][:few] for name in "ab"}
    yield "states of integers", {"state": good["state"].long()}


SPEC = contract(
    recurrent_gated_delta_rule,
    {
        **DELTA_RULE_HEADS,
        "a": tensor("tokens, value_heads", "q"),
        "b": like("a"),
        "A_log": tensor("value_heads", "q", "float32"),
        "dt_bias": tensor("value_heads", "q", "float32"),
        "state": tensor("slots, value_heads, value_size, key_size", "q", "float32"),
        "state_indices": integers("tokens"),
        "epsilon": scalar("value > 0").optional(),
    },
    (like("v"), like("state")),
    also=_also,
    overwrites=("", "state"),
    bad=_bad,
    samples=_samples,
    served=served_heads(_call),
    second_form=_by_matrices,
    **OF_SEQUENCES,
    outputs=(Within(), OUTPUTS[1]),
    tolerances={
        "float32": Tolerance(1e-4, 1e-5, "sums of 128 products in fp32, and gates by a fast exp"),
        "float16": Tolerance(
            2e-3, 1e-3, "4 roundings of 2^-11; atol for q and k that are rounded once normed"
        ),
        "bfloat16": Tolerance(
            1.6e-2, 8e-3, "4 roundings of 2^-8; atol for q and k that are rounded once normed"
        ),
    },
)
