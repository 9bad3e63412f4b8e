"""Incorrect forms of the ops, with mistakes of real kernels: the contracts' samples detect each.
Only mistakes that few samples detect: samples that miss another mistake miss one of these first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from telling import CPU, Form, detects, problem

from vllm_fl.plugins.registry import known_contracts
from vllm_fl_ops.contracts import fused_experts
from vllm_fl_ops.contracts.rules import typical_sizes

SIZES = typical_sizes(known_contracts().bindings.values())
ORACLES = {name: spec.oracle for name, spec in known_contracts().contracts.items()}


def other(op: str, **others: Any) -> Form:
    """The op on changed arguments: parameter -> value, or a function of the call's arguments."""
    parameters = known_contracts().contracts[op].parameters

    def form(*args: Any) -> Any:
        call = dict(zip(parameters, args, strict=True))
        changed = {n: make(call) if callable(make) else make for n, make in others.items()}
        return ORACLES[op](**{**call, **changed})

    return form


def packed(name: str) -> Callable[[dict[str, Any]], Any]:
    """The values read by a kernel that takes a strided tensor for contiguous."""

    def read(call: dict[str, Any]) -> Any:
        x = call[name]
        if x is None or x.is_contiguous():
            return x
        storage = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
        at = (x.storage_offset() + torch.arange(x.numel())) % max(len(storage), 1)
        return storage[at].view(x.shape)

    return read


def swapped(x: torch.Tensor) -> torch.Tensor:
    return torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1)


def paired(x: torch.Tensor) -> torch.Tensor:
    """As if gate and up projection were interleaved."""
    return torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)


def activations() -> Iterator[tuple[str, str, Form]]:
    for op in ("gelu_new", "gelu_fast"):
        yield op, "erf", lambda x: F.gelu(x.double())
        yield op, "no cube", lambda x: x.double() * (1.5957691 * x.double()).sigmoid()
    yield "quick_gelu", "1.7", lambda x: x.double() * (1.7 * x.double()).sigmoid()
    yield "quick_gelu", "silu", lambda x: F.silu(x.double())
    yield "relu2", "relu6", lambda x: F.relu6(x.double()).square()
    yield "silu_and_mul", "swapped halves", lambda x: ORACLES["silu_and_mul"](swapped(x))
    yield "mul_and_silu", "swapped halves", ORACLES["silu_and_mul"]
    yield "mul_and_silu", "pairs", lambda x: ORACLES["mul_and_silu"](paired(x))
    yield "gelu_and_mul", "always erf", other("gelu_and_mul", approximate="none")
    yield "gelu_and_mul", "always tanh", other("gelu_and_mul", approximate="tanh")
    yield "silu_and_mul_with_clamp", "alpha ignored", other("silu_and_mul_with_clamp", alpha=1.0)
    yield "silu_and_mul_with_clamp", "beta of gpt-oss", other("silu_and_mul_with_clamp", beta=1.0)
    fatrelu = ORACLES["fatrelu_and_mul"]
    yield "fatrelu_and_mul", "at the threshold, too", lambda x, t: fatrelu(x, t - 1e-9)
    sparse = ORACLES["gelu_and_mul_sparse"]
    yield "gelu_and_mul_sparse", "1.6448536 for all", lambda x, m, a: sparse(x, 1.6448536, a)
    yield "gelu_and_mul_sparse", "always erf", lambda x, m, a: sparse(x, m, "none")

    def one_beta(x: Any, p: Any, n: Any, b: Any, e: Any) -> Any:
        wide = x.double()
        below = b.double() * (wide.clamp(max=0).expm1() - wide) * (x < 0)
        return ORACLES["xielu"](x, p, n, b, e) - below

    yield "xielu", "alpha_n without beta", one_beta


def norms_and_ropes() -> Iterator[tuple[str, str, Form]]:
    norm, rotary = ORACLES["rms_norm"], ORACLES["rotary_embedding"]

    def stale(*args: Any) -> Any:
        return norm(*args) if args[1] is None else (norm(*args)[0], args[1])

    yield "rms_norm", "no variance_size", other("rms_norm", variance_size=None)
    yield "rms_norm", "epsilon / 10", other("rms_norm", epsilon=lambda c: c["epsilon"] / 10)
    yield "rms_norm", "residual not written", stale
    turned = other("rotary_embedding", rotary_interleaved=False)
    yield "rotary_embedding", "never interleaved", turned
    yield "rotary_embedding", "key untouched", lambda q, k, *a: (rotary(q, None, *a)[0], k)

    op = "qk_norm_rope"

    def half_a_head_apart(call: dict[str, Any]) -> torch.Tensor:
        """Pairs as far apart as heads allow, with any table width."""
        half = call["q_weight"].shape[0] // 2
        cos, sin = (part[:, :half] for part in call["cos_sin_cache"].chunk(2, dim=-1))
        more = (0, half - cos.shape[1])
        return torch.cat((F.pad(cos, more, value=1.0), F.pad(sin, more)), dim=-1)

    yield op, "epsilon / 10", other(op, epsilon=lambda call: call["epsilon"] / 10)
    yield op, "never interleaved", other(op, rotary_interleaved=False)
    yield op, "pairs half a head apart", other(op, cos_sin_cache=half_a_head_apart)


def linear_attention() -> Iterator[tuple[str, str, Form]]:
    gates, rule = ORACLES["gdn_gating"], ORACLES["chunk_gated_delta_rule"]
    step, whole = ORACLES["recurrent_gated_delta_rule"], ORACLES["causal_conv1d"]
    one = ORACLES["causal_conv1d_update"]

    def other_heads(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        share = v.shape[1] // q.shape[1]
        return rule(q.repeat(1, share, 1), k.repeat(1, share, 1), v, *rest)

    yield "gdn_gating", "first head for all", lambda a, b, A, d: gates(a, b, A[:1].expand_as(A), d)
    op = "chunk_gated_delta_rule"
    yield op, "heads shared by turns", other_heads
    yield op, "one sequence", lambda *x: rule(*x[:6], x[6] * (x[6] == x[6][-1]), x[7])
    op = "recurrent_gated_delta_rule"
    yield op, "padding computed", lambda *x: step(*x[:8], x[8] + (x[8] == 0).int(), x[9])
    yield "causal_conv1d", "always activated", lambda *x: whole(*x[:7], "silu")
    yield "causal_conv1d", "states in order", lambda *x: whole(*x[:5], x[5].sort().values, *x[6:])
    op = "causal_conv1d_update"
    yield op, "always activated", lambda *x: one(*x[:4], "silu", x[5])
    yield op, "padding computed", lambda *x: one(*x[:5], x[5] + (x[5] == 0).int())


def as_packed(x: torch.Tensor) -> torch.Tensor:
    """The values read by a kernel that ignores strides."""
    return x.as_strided(x.shape, torch.empty(x.shape).stride())


def fitting(x: torch.Tensor, like: torch.Tensor) -> tuple[int, ...]:
    """The strides of `like` if x's storage is large enough, otherwise the strides of x."""
    reach = sum((n - 1) * step for n, step in zip(like.shape, like.stride(), strict=True))
    return like.stride() if reach < x.untyped_storage().nbytes() // x.itemsize else x.stride()


def merged(p: Any, a: Any, s: Any, b: Any, most: Any) -> Any:
    x, y = (a - most).exp(), (b - most).exp()
    total = x + y
    output = (p.double() * x[..., None] + s.double() * y[..., None]) / total[..., None]
    return output, (total.log() + most).double()


def paging() -> Iterator[tuple[str, str, Form]]:
    write, concat = ORACLES["reshape_and_cache"], ORACLES["concat_and_cache_mla"]
    merge = ORACLES["merge_attn_states"]

    def padding_written(k: Any, v: Any, kc: Any, vc: Any, slots: Any) -> Any:
        """Negative slots count from the end, like in Python."""
        return write(k, v, kc, vc, slots % (kc.shape[0] * kc.shape[1]))

    def overflowing(p: Any, a: Any, s: Any, b: Any) -> Any:
        return merged(p, a.masked_fill(a.isinf(), -1e4), s, b.masked_fill(b.isinf(), -1e4), 0 * a)

    yield "reshape_and_cache", "padding written", padding_written
    strided = lambda k, v, *rest: write(as_packed(k), as_packed(v), *rest)  # noqa: E731
    yield "reshape_and_cache", "strided keys read as if packed", strided
    op = "concat_and_cache_mla"
    yield op, "a strided projection read as if packed", lambda c, *rest: concat(as_packed(c), *rest)
    yield op, "gaps in the cache not minded", lambda c, p, kv, s: concat(c, p, as_packed(kv), s)
    op = "merge_attn_states"
    yield op, "+inf as it is", lambda p, a, s, b: merged(p, a, s, b, torch.maximum(a, b))
    yield op, "without the largest taken off", overflowing
    by_prefix = lambda p, a, s, b: merge(p, a, s.as_strided(s.shape, fitting(s, p)), b)  # noqa: E731
    yield op, "the suffix read by the prefix's strides", by_prefix


def routing() -> Iterator[tuple[str, str, Form]]:
    topk, grouped = ORACLES["moe_topk"], known_contracts().contracts["grouped_topk"]

    def scaled_first(x: Any, k: int, renormalize: bool, how: str, factor: float, bias: Any) -> Any:
        weights, ids = topk(x, k, False, how, factor, bias)
        return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), ids

    def of_chosen(call: dict[str, Any]) -> bool:
        plain = call["scoring_func"] == "softmax" and call["e_score_correction_bias"] is None
        return plain or call["renormalize"]

    def masked_with_0(x: Any, k: int, r: bool, g: int, best: int, *rest: Any) -> Any:
        how, factor, _ = rest
        scores = x.double().softmax(-1) if how == "softmax" else x.double().sigmoid()
        allowed = grouped.outputs[0].scores(x, k, r, g, best, *rest)  # type: ignore[union-attr]
        ids = allowed.nan_to_num(0.0, 0.0, 0.0).topk(k, -1).indices
        weights = scores.gather(-1, ids)
        return (weights / weights.sum(-1, keepdim=True) if r else weights) * factor, ids

    op = "moe_topk"
    yield op, "softmax of the chosen alone", other(op, renormalize=of_chosen)
    yield op, "scaled before it is renormalised", scaled_first
    yield op, "bias ignored", other(op, e_score_correction_bias=None)
    yield op, "always softmax", other(op, scoring_func="softmax")
    yield op, "packed rows", other(op, gating_output=packed("gating_output"))
    op = "grouped_topk"
    yield op, "other groups masked with 0", masked_with_0
    yield op, "always renormalised", other(op, renormalize=True)
    yield op, "not scaled", other(op, routed_scaling_factor=1.0)
    yield op, "always sigmoid", other(op, scoring_func="sigmoid")
    yield op, "packed rows", other(op, gating_output=packed("gating_output"))
    op, many = "moe_sum", 1 << 30
    yield op, "map ignored", other(op, expert_map=None)

    def last_expert(call: dict[str, Any]) -> Any:
        ids, here = call["topk_ids"], call["expert_map"]
        return None if ids is None else ids % (many if here is None else len(here))

    yield op, "-1 taken for the last expert", other(op, topk_ids=last_expert)
    yield op, "packed rows", other(op, input=packed("input"))
    op = "moe_align_block_size"
    right = ORACLES[op]
    yield op, "experts elsewhere have rows", lambda *x: right(*x[:5], False)
    yield op, "experts elsewhere have none", lambda *x: right(*x[:5], True)
    yield op, "-1 taken for the last expert", lambda ids, size, n, *x: right(ids % n, size, n, *x)
    yield op, "packed ids", other(op, topk_ids=packed("topk_ids"))


def experts() -> Iterator[tuple[str, str, Form]]:
    op, right = "fused_experts", known_contracts().contracts["fused_experts"]

    def for_other(name: str, instead: str) -> Form:
        of = lambda call: instead if call["activation"] == name else call["activation"]  # noqa: E731
        return other(op, activation=of)

    def halves(call: dict[str, Any]) -> torch.Tensor:
        w13: torch.Tensor = call["w13"]
        pairs = call["activation"] == "swigluoai"
        return torch.cat((w13[:, ::2], w13[:, 1::2]), dim=1) if pairs else w13

    def turned(call: dict[str, Any]) -> torch.Tensor:
        w2: torch.Tensor = call["w2"]
        return w2.mT if w2.shape[1] == w2.shape[2] else w2

    def whole_bias(*args: Any) -> Any:
        call = dict(zip(right.parameters, args, strict=True))
        bias = call["w2_bias"]
        if bias is None:
            return right.oracle(*args)
        ids = call["topk_ids"].long()
        return right.oracle(**{**call, "w2_bias": None}) + bias[ids].double().sum(1)

    def row_0(call: dict[str, Any]) -> Any:
        return None if call["expert_map"] is None else call["expert_map"].clamp(min=0)

    yield op, "halves where pairs are", other(op, w13=halves)
    yield op, "w2 transposed, where that fits", other(op, w2=turned)
    yield op, "silu for gelu", for_other("gelu", "silu")
    yield op, "erf for tanh", for_other("gelu_tanh", "gelu")
    yield op, "a bias of w2 that no weight multiplies", whole_bias
    yield op, "strides of hidden_states", other(op, hidden_states=packed("hidden_states"))
    yield op, "experts of other ranks by row 0", other(op, expert_map=row_0)
    late = other(op, apply_router_weight_on_input=False)
    yield op, "weights on the result, not on the input", late


FINE = {"erf", "1.7", "always erf"}
"""Mistakes smaller than the rounding of a 16-bit dtype."""

test_samples_tell_a_wrong_activation = detects(
    activations(), lambda op, what: what in FINE and op != "gelu_and_mul", without="NaN"
)
test_samples_tell_a_wrong_op = detects(
    [
        form
        for family in (norms_and_ropes, linear_attention, paging, routing, experts)
        for form in family()
    ]
)


@pytest.mark.parametrize("op", ["moe_topk", "grouped_topk", "moe_sum", "moe_align_block_size"])
def test_samples_take_the_right_op(op: str) -> None:
    spec = known_contracts().contracts[op]
    for dtype in (getattr(torch, name) for name in spec.dtypes):
        served = [s for big in (False, True) for s in spec.served(SIZES, dtype, CPU, big)]
        for sample in (*spec.samples(dtype, CPU), *served):
            assert problem(spec, spec.oracle, sample) == "", sample.name


@pytest.mark.parametrize(("number", "wrong"), [("LIMIT", 100.0), ("ALPHA", 1.0)])
def test_other_constants_of_swigluoai_are_found(
    monkeypatch: pytest.MonkeyPatch, number: str, wrong: float
) -> None:
    spec = known_contracts().contracts["fused_experts"]

    def form(*args: Any) -> torch.Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(fused_experts, number, wrong)
            return spec.oracle(*args)

    assert any(problem(spec, form, sample) for sample in spec.samples(torch.bfloat16, CPU))


def test_the_rows_of_an_expert_come_in_any_order_over_its_blocks() -> None:
    spec = known_contracts().contracts["moe_align_block_size"]

    def last_rows_first(ids: torch.Tensor, *rest: Any) -> Any:
        rows, experts, used = spec.oracle(ids, *rest)
        by_expert = rows[: int(used)].split(rest[0])
        found = experts[: len(by_expert)].unique()
        for expert in found[found >= 0]:  # -1 is many experts
            own = torch.cat([b for b, e in zip(by_expert, experts, strict=False) if e == expert])
            own = own[own < ids.numel()].flip(0)
            rows[torch.isin(rows, own).nonzero().flatten()] = own
        rows[int(used) :] = 7  # later entries may have any value
        experts[len(by_expert) :] = 7
        return rows, experts, used

    for sample in spec.samples(torch.int32, CPU):
        assert problem(spec, last_rows_first, sample) == "", sample.name
