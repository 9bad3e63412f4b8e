"""The gated delta rule over whole sequences: linear attention in prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.arguments import Problem, integers, like, scalar, tensor
from vllm_fl.contracts.outputs import Within
from vllm_fl.contracts.sampling import Source
from vllm_fl.contracts.spec import ModelSizes, Sample, Tolerance

from .common import contract
from .sequences import OF_SEQUENCES, boundaries, ends, fitting_heads, sample

if TYPE_CHECKING:
    import torch


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    epsilon: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of each token, and the state of each sequence after its last token.

    For each token in order, with its sequence's state S of (value_size, key_size) for each head:
    S = exp(g) * S; S = S + beta * (v - S k) k^T; out = S q / sqrt(key_size).

    Args:
        q, k: (tokens, heads, key_size), float32, float16 or bfloat16, of any layout. A NaN affects
            no other sequence.
        v: (tokens, value_heads, value_size), of q's dtype, of any layout; value_heads is a multiple
            of heads. value_heads / heads consecutive heads of v share a head of q and k.
        g: (tokens, value_heads), float32, of any layout, at most 0: the logarithm of the decay
            factor of a state.
        beta: (tokens, value_heads), of q's dtype or float32, of any layout, from 0 to 1.
        initial_state: (sequences, value_heads, value_size, key_size), of q's dtype or float32.
        cu_seqlens: (sequences + 1,), int32 or int64: the first token of each sequence, then the
            number of tokens. The state of an empty sequence is returned unchanged.
        epsilon: None uses q and k unchanged; the state then grows without bound if a k is longer
            than 1. A number above 0 divides each row x of q and k by sqrt(sum(x**2) + epsilon)
            first.

    Returns:
        (out, final_state), contiguous. `out` has v's shape and dtype; final_state has those of
        initial_state. The inputs are not modified.

    Raises:
        CallError: an argument violates this contract. cu_seqlens is not checked before the call. On
            an accelerator, incorrect values cause a device error or undefined results.

    Source: Yang et al., "Gated Delta Networks" (arXiv:2412.06464), equation 10.
    """
    import torch

    q, k, v, g, beta = _widened(q, k, v, g, beta, epsilon)
    out, state = torch.zeros_like(v), initial_state.double().clone()
    for sequence, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        for token in range(begin, end):
            kept = state[sequence] * g[token].exp()[:, None, None]
            missing = v[token] - (kept @ k[token].unsqueeze(-1)).squeeze(-1)
            learnt = beta[token][:, None] * missing
            state[sequence] = kept + learnt.unsqueeze(-1) * k[token].unsqueeze(-2)
            out[token] = (state[sequence] @ q[token].unsqueeze(-1)).squeeze(-1)
    return out, state


def _widened(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    epsilon: float | None,
) -> tuple[torch.Tensor, ...]:
    """The inputs in fp64; q and k are normalised and repeated per head of v, and q is scaled."""
    q, k = q.double(), k.double()
    if epsilon is not None:
        q, k = (x * (x.pow(2).sum(-1, keepdim=True) + epsilon).rsqrt() for x in (q, k))
    share = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(share, dim=1) for x in (q * q.shape[-1] ** -0.5, k))
    return q, k, v.double(), g.double(), beta.double()


def _by_triangular_systems(*call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Solve one linear system per sequence for the tokens' additions to the state."""
    import torch

    q, k, v, g, beta, initial_state, cu_seqlens, epsilon = call
    q, k, v, g, beta = (x.transpose(0, 1) for x in _widened(q, k, v, g, beta, epsilon))
    outs, states = [], []
    for sequence, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        its = slice(begin, end)
        s0 = initial_state[sequence].double()
        decay = g[:, its].cumsum(1)
        between = (decay[:, :, None] - decay[:, None, :]).tril().exp().tril()
        kq, qq, strength = k[:, its], q[:, its], beta[:, its, None]
        known = kq @ s0.transpose(1, 2) * decay.exp()[..., None]
        system = (strength * (kq @ kq.transpose(1, 2)) * between).tril(-1)
        eye = torch.eye(end - begin, dtype=torch.float64, device=q.device)
        added = torch.linalg.solve_triangular(
            eye + system, strength * (v[:, its] - known), upper=False
        )
        seen = qq @ s0.transpose(1, 2) * decay.exp()[..., None]
        outs.append(seen + (qq @ kq.transpose(1, 2) * between).tril() @ added)
        last = (decay[:, -1:] if end > begin else decay.new_zeros(len(decay), 1))[..., None]
        fading = (last[..., 0] - decay).exp()[..., None]
        states.append(s0 * last.exp() + (added * fading).transpose(1, 2) @ kq)
    return torch.cat(outs, 1).transpose(0, 1).contiguous(), torch.stack(states)


def _call(
    source: Source,
    ends: tuple[int, ...],
    heads: int = 2,
    value_heads: int = 2,
    key_size: int = 64,
    value_size: int = 64,
    strength: float = 1.0,
) -> dict[str, Any]:
    """A call for sequences with these ends. States fade faster with a larger `strength`."""
    import torch
    import torch.nn.functional as F

    tokens, fp32 = ends[-1], torch.float32
    return {
        **qkv(source, tokens, heads, value_heads, key_size, value_size),
        "g": -strength * F.softplus(source.normal(tokens, value_heads, dtype=fp32)),
        "beta": source.normal(tokens, value_heads, dtype=fp32).sigmoid().to(source.dtype),
        "initial_state": source.normal(
            len(ends), value_heads, value_size, key_size, scale=0.5, dtype=fp32
        ),
        "cu_seqlens": torch.tensor((0, *ends), dtype=torch.int32, device=source.device),
        "epsilon": 1e-6,
    }


def qkv(
    source: Source, tokens: int, heads: int, value_heads: int, key_size: int, value_size: int
) -> dict[str, torch.Tensor]:
    """q, k and v as a model passes them: views of one convolution's result."""
    sizes = heads * key_size, heads * key_size, value_heads * value_size
    q, k, v = source.normal(tokens, sum(sizes)).split(sizes, dim=-1)
    q, k = (x.unflatten(-1, (heads, key_size)) for x in (q, k))
    return {"q": q, "k": k, "v": v.unflatten(-1, (value_heads, value_size))}


def normed(call: dict[str, Any]) -> dict[str, Any]:
    """The call with q and k already normalised, and no epsilon."""
    import torch.nn.functional as F

    turned = {name: F.normalize(call[name].float(), dim=-1).to(call[name].dtype) for name in "qk"}
    return call | turned | {"epsilon": None}


def _samples(source: Source) -> Iterator[Sample]:
    import torch

    for tokens in (16, 1, 0):
        name = f"{tokens} token{'s' * (tokens != 1)}"
        yield sample(name, _call(source, (tokens,)))
    two = _call(source, (67, 70), value_heads=4)
    two["initial_state"][0] = 0  # a new sequence
    yield sample("two sequences, the first beyond 64 tokens", two)
    # The last sequence is one whole chunk.
    yield sample("an empty sequence between", _call(source, (5, 5, 69)))
    before = normed(_call(source, (3, 8), 1, 2, 128, 128))
    yield sample("normed before, heads of 128", before)
    yield sample("other sizes of keys and values", _call(source, (9,), 1, 3, 32, 16))
    fading = _call(source, (66,), strength=12.0)
    yield sample("states that fade to nothing", fading)
    of_q = _call(source, (6, 11))
    of_q["initial_state"] = of_q["initial_state"].to(source.dtype)
    yield sample("states in the dtype of q", of_q)
    wide = _call(source, (7,), value_heads=4)
    wide["beta"] = wide["beta"].to(torch.float32)
    yield sample("beta in float32", wide)
    yield sample("large epsilon", _call(source, (5,)), epsilon=30.0)
    broken = _call(source, (5, 9, 12))
    broken["v"][5, 1, 7] = float("nan")  # of the second sequence's first token
    yield sample("NaN in a sequence", broken)


def served_heads(made: Callable[..., dict[str, Any]]) -> Callable[..., Iterator[Sample]]:
    """Return the `served` argument of `contract` for a delta rule.

    `made`: (source, tokens, heads, value_heads, key_size, value_size) -> arguments by parameter.
    """

    def served(
        source: Source,
        sizes: ModelSizes,
        linear_key_heads: int,
        linear_value_heads: int,
        linear_key_head_dim: int,
        linear_value_head_dim: int,
    ) -> Iterator[Sample]:
        widths = linear_key_head_dim, linear_value_head_dim
        for tokens in sizes.tokens:
            few, few_values, smaller = fitting_heads(tokens, linear_key_heads, linear_value_heads)
            call = made(source, tokens, few, few_values, *widths)
            if source.large:
                call["v"] = call["v"] * 30.0
            name = f"{tokens} x {few}+{few_values} heads of {widths[0]}{', large' * source.large}"
            yield Sample(name, (*call.values(),), 30.0 if source.large else 1.0, smaller)

    return served


OUTPUTS = (
    Within(),
    Within(
        {
            "float32": Tolerance(
                1.6e-2,
                2e-2,
                "q, k, v in bfloat16 and chunks of 64 tokens, with products rounded to bfloat16 "
                "before they are summed: 2 roundings of 2^-8, and as much of a state of magnitude "
                "1 if terms cancel",
            ),
            "float16": Tolerance(1.7e-2, 2e-2, "as for float32, and a rounding of 2^-11"),
            "bfloat16": Tolerance(2.4e-2, 3e-2, "as for float32, and a rounding of 2^-8"),
        }
    ),
)
"""How to compare the results of a delta rule: its outputs and its states."""


def _also(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, begins: Any, *_: Any) -> Problem:
    return boundaries("cu_seqlens", begins, len(q))


def _bad(good: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    at = good["cu_seqlens"]
    yield "states of integers", {"initial_state": good["initial_state"].long()}
    if at.device.type == "cpu":  # bad offsets make an accelerator unusable
        yield "cu_seqlens beyond the tokens", {"cu_seqlens": at * 2}
        yield "cu_seqlens before the last token", {"cu_seqlens": at.clamp(max=len(good["q"]) - 1)}
        yield "cu_seqlens that fall", {"cu_seqlens": at.flip(0)}


DELTA_RULE_HEADS = {
    "q": tensor("tokens, heads, key_size"),
    "k": like("q"),
    "v": tensor(
        "tokens, value_heads, value_size",
        "q",
        where="value_heads >= 1 and value_heads % heads == 0",
    ),
}
"""Queries, keys and values of a delta rule."""

SPEC = contract(
    chunk_gated_delta_rule,
    {
        **DELTA_RULE_HEADS,
        "g": tensor("tokens, value_heads", "float32"),
        "beta": tensor("tokens, value_heads", "q", "float32"),
        "initial_state": tensor("sequences, value_heads, value_size, key_size", "q", "float32"),
        "cu_seqlens": integers("sequences + 1"),
        "epsilon": scalar("value > 0").optional(),
    },
    (like("v"), like("initial_state")),
    also=_also,
    bad=_bad,
    samples=_samples,
    served=served_heads(lambda source, tokens, *of: _call(source, ends(tokens, source.large), *of)),
    second_form=_by_triangular_systems,
    **OF_SEQUENCES,
    outputs=OUTPUTS,
    tolerances={
        "float32": Tolerance(1e-4, 1e-5, "sums of 128 products in fp32, over up to 70 tokens"),
        "float16": Tolerance(
            2e-3, 1e-3, "4 roundings of 2^-11; atol because products of chunks are rounded"
        ),
        "bfloat16": Tolerance(
            1.6e-2, 8e-3, "4 roundings of 2^-8; atol because products of chunks are rounded"
        ),
    },
)
