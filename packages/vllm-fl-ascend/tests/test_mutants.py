"""Wrong versions of the ops, each with one mistake: the conformance kit or the contracts' samples
see every one."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from mutating import Mutant, made_anew
from test_contracts import DTYPES, IMPLS, mistakes, one_row, unseen

from vllm_fl import OpImpl
from vllm_fl.testing import failures
from vllm_fl_ascend import impl as shared
from vllm_fl_ascend.impl import (
    activation,
    experts,
    gated_normalization,
    merging,
    multimodal_rotary,
    normalization,
    quantisation,
    rotary,
    routing,
)
from vllm_fl_ascend.plugin import MODULES

SLOW = ("fork", "spawn", "engine", "tracing", "opcheck")
"""Checks that no mistake of these is for."""

KEYWORD, HALVES, LAYOUT, EPSILON = "keyword", "halves", "layout", "epsilon"
RESIDUAL, RESULT, EMPTY, REFUSAL = "residual", "result", "empty", "refusal"
ROUTING = "routing"

MUTANTS = [
    Mutant(KEYWORD, activation, "npu_swiglu.default(x, dim=-1)", "npu_swiglu.default(x, axis=-1)"),
    Mutant(KEYWORD, activation, "approximate=form", "approximation=form"),
    Mutant(KEYWORD, activation, "activate_left=True", "left=True"),
    Mutant(
        KEYWORD,
        normalization,
        "(_rows(x), weight, epsilon=epsilon)",
        "(_rows(x), weight, eps=epsilon)",
    ),
    Mutant(
        KEYWORD,
        normalization,
        "_rows(residual), weight, epsilon=epsilon",
        "_rows(residual), weight, variance_epsilon=epsilon",
    ),
    Mutant(KEYWORD, rotary, "rotary_mode=", "mode="),
    Mutant(KEYWORD, rotary, '"interleave"', '"interleaved"'),
    Mutant(KEYWORD, activation, "torch.ops.npu.npu_swiglu", "torch.ops.npu.npu_swiglu_backward"),
    Mutant(KEYWORD, normalization, "npu.npu_rms_norm.", "npu.npu_gemma_rms_norm."),
    Mutant(KEYWORD, experts, "group_type=0", "group_kind=0"),
    Mutant(KEYWORD, experts, "group_list_type=1", "group_list_type=0"),
    Mutant(KEYWORD, experts, "expert_tokens_num_flag=True", "expert_tokens_num_flag=False"),
    Mutant(HALVES, activation, ", activate_left=True", ""),
    Mutant(HALVES, activation, "activate_left=True", "activate_left=False"),
    Mutant(
        HALVES,
        activation,
        "npu_swiglu.default(x,",
        "npu_swiglu.default(torch.cat(x.chunk(2, -1)[::-1], -1),",
    ),
    Mutant(HALVES, activation, "npu_swiglu.default(x, dim=-1)", "npu_swiglu.default(x, dim=0)"),
    Mutant(HALVES, activation, '{"none": 0, "tanh": 1}', '{"none": 1, "tanh": 0}'),
    Mutant(HALVES, activation, "approximate=form,", ""),
    Mutant(HALVES, activation, "bias=beta, interleaved=False", "bias=beta, interleaved=True"),
    Mutant(KEYWORD, activation, "limit=limit, bias=beta,", "limit=limit, bias=1.0,"),
    Mutant(KEYWORD, activation, "npu_fast_gelu.default(x)", "npu_gelu.default(x)"),
    Mutant(HALVES, activation, "out, _gelu = torch", "_gelu, out = torch"),
    Mutant(
        HALVES,
        rotary,
        "joint_cos_sin(cos, sin),",
        "torch.cat((sin, cos), -1),",
    ),
    Mutant(KEYWORD, gated_normalization, "epsilon=epsilon", "eps=epsilon"),
    Mutant(EPSILON, gated_normalization, "epsilon=epsilon", "epsilon=1e-5"),
    Mutant(HALVES, gated_normalization, "and not norm_before_gate:", "and norm_before_gate:"),
    Mutant(RESULT, gated_normalization, "if group_size is None else group_size", ""),
    Mutant(
        RESULT,
        gated_normalization,
        "weight.float() if alone else y.new_ones(size)",
        "y.new_ones(size)",
    ),
    Mutant(RESULT, gated_normalization, "    if not alone:\n", "    if False:\n"),
    Mutant(RESULT, gated_normalization, "ACTIVATIONS[activation]", "F.silu"),
    Mutant(RESULT, gated_normalization, "normed.to(x.dtype)", "normed"),
    Mutant(EMPTY, gated_normalization, "if not x.numel():", "if False:"),
    Mutant(REFUSAL, gated_normalization, "if epsilon <= 0:", "if False:"),
    Mutant(HALVES, multimodal_rotary, "joint_cos_sin(cos, sin),", "torch.cat((sin, cos), -1),"),
    Mutant(HALVES, multimodal_rotary, '"interleave" if rotary_interleaved else "half"', '"half"'),
    Mutant(KEYWORD, multimodal_rotary, "mrope_section=list(mrope_section)", "mrope_section=[]"),
    Mutant(HALVES, multimodal_rotary, "list(mrope_section)", "list(mrope_section)[::-1]"),
    Mutant(LAYOUT, multimodal_rotary, "position_ids.t()", "position_ids"),
    Mutant(LAYOUT, multimodal_rotary, "position_ids.t()", "position_ids.t().flip(0)"),
    Mutant(LAYOUT, multimodal_rotary, "key.flatten(1),", "key.flip(1).flatten(1),"),
    Mutant(KEYWORD, quantisation, "quant.default(x)", "quant.default(x, dst_type=24)"),
    Mutant(KEYWORD, quantisation, "quant.default(x)", 'quant.default(x, quant_mode="pertensor")'),
    Mutant(LAYOUT, quantisation, "quant.default(x)", "quant.default(x.flip(0))"),
    Mutant(RESULT, quantisation, "steps.unsqueeze(-1)", "steps"),
    Mutant(EMPTY, quantisation, "if not x.numel():", "if False:"),
    Mutant(REFUSAL, quantisation, "if scale is not None or azp", "if azp"),
    Mutant(REFUSAL, quantisation, "if asymmetric is not None:", "if False:"),
    Mutant(EMPTY, multimodal_rotary, "if not query.numel():", "if False:"),
    Mutant(REFUSAL, multimodal_rotary, "    if mrope_interleaved:", "    if False:"),
    Mutant(HALVES, rotary, "if rotary_interleaved else", "if not rotary_interleaved else"),
    Mutant(HALVES, rotary, '"interleave" if rotary_interleaved else "half"', '"half"'),
    Mutant(HALVES, rotary, '"interleave" if rotary_interleaved else "half"', '"interleave"'),
    Mutant(LAYOUT, experts, "[weight.transpose(1, 2)]", "[weight]"),
    Mutant(LAYOUT, experts, "x.contiguous(),", "x,"),
    Mutant(LAYOUT, experts, "probs=weights.contiguous()", "probs=weights.flip(1)"),
    Mutant(LAYOUT, experts, "counts), places,", "counts), places.flip(0),"),
    Mutant(LAYOUT, rotary, "query.flatten(1),", "query,"),
    Mutant(LAYOUT, rotary, "query.flatten(1),", "query.transpose(1, 2).flatten(1),"),
    Mutant(LAYOUT, rotary, "second.flatten(1),", "second.flip(1).flatten(1),"),
    Mutant(
        LAYOUT,
        rotary,
        "        query.shape[-1],\n        rotary_mode",
        "        2 * cos.shape[-1],\n        rotary_mode",
    ),
    Mutant(
        LAYOUT,
        rotary,
        "        query.shape[-1],\n        rotary_mode",
        "        query.shape[-1] * query.shape[1],\n        rotary_mode",
    ),
    Mutant(LAYOUT, rotary, "turned.view(query.shape)", "turned"),
    Mutant(LAYOUT, rotary, "other.view(key.shape)", "other"),
    Mutant(LAYOUT, rotary, "position_ids.long(),", "position_ids,"),
    Mutant(LAYOUT, rotary, "position_ids.long(),", "position_ids.long().sort().values,"),
    Mutant(LAYOUT, rotary, "position_ids.long(),", "torch.arange(len(query)),"),
    Mutant(
        LAYOUT,
        normalization,
        "return normed.contiguous().view(x.shape)\n",
        "return normed.mT.contiguous().mT.reshape(x.shape[::-1])\n",
    ),
    Mutant(
        LAYOUT,
        normalization,
        "return x[None] if x.ndim == 1 else x",
        "return x[:, None] if x.ndim == 1 else x",
    ),
    Mutant(EPSILON, normalization, "(_rows(x), weight, epsilon=epsilon)", "(_rows(x), weight)"),
    Mutant(
        EPSILON,
        normalization,
        "(_rows(x), weight, epsilon=epsilon)",
        "(_rows(x), weight, epsilon=1e-5)",
    ),
    Mutant(
        EPSILON,
        normalization,
        "_rows(residual), weight, epsilon=epsilon",
        "_rows(residual), weight",
    ),
    Mutant(
        EPSILON,
        normalization,
        "_rows(residual), weight, epsilon=epsilon",
        "_rows(residual), weight, epsilon=epsilon**2",
    ),
    Mutant(RESIDUAL, normalization, "total.contiguous().view(x.shape)", "residual"),
    Mutant(RESIDUAL, normalization, "total.contiguous().view(x.shape)", "x"),
    Mutant(
        RESIDUAL,
        normalization,
        "normed.contiguous().view(x.shape), total",
        "total.contiguous().view(x.shape), normed",
    ),
    Mutant(
        RESIDUAL,
        normalization,
        "    if residual is None:\n        normed",
        "    if True:\n        normed",
    ),
    Mutant(
        RESIDUAL, normalization, "_rows(x), _rows(residual),", "_rows(residual), _rows(residual),"
    ),
    Mutant(
        RESIDUAL,
        normalization,
        "return normed.contiguous().view(x.shape), total",
        "return normed.view(x.shape), residual.copy_(total.view(x.shape)), total",
    ),
    Mutant(
        RESIDUAL,
        normalization,
        "return normed.contiguous().view(x.shape), total.contiguous().view(x.shape)",
        "return normed.view(x.shape), residual.copy_(total.view(x.shape))",
    ),
    Mutant(
        RESULT,
        activation,
        "= torch.ops.npu.npu_swiglu.default(x, dim=-1)",
        "= torch.ops.npu.npu_swiglu.default(x, dim=-1).float()",
    ),
    Mutant(RESULT, normalization, "x.new_ones(x.shape[-1])", "x.new_zeros(x.shape[-1])"),
    Mutant(
        RESULT,
        normalization,
        "x.new_ones(x.shape[-1])",
        "x.new_ones(x.shape[-1], dtype=torch.float32)",
    ),
    Mutant(
        RESULT,
        normalization,
        "if weight is None:\n        weight = x",
        "if True:\n        weight = x",
    ),
    Mutant(RESULT, normalization, "normed, _rstd = torch", "_rstd, normed = torch"),
    Mutant(RESULT, normalization, "normed, _rstd, total", "total, _rstd, normed"),
    Mutant(RESULT, rotary, "None if key is None else other.view(key.shape)", "other"),
    Mutant(RESULT, rotary, "None if key is None else other.view(key.shape)", "key"),
    Mutant(
        RESULT,
        rotary,
        "turned.view(query.shape), None",
        "query.copy_(turned.view(query.shape)), None",
    ),
    Mutant(RESULT, rotary, "query[:, :1] if key is None", "query[:, :0] if key is None"),
    Mutant(RESULT, rotary, "turned, other = torch", "other, turned = torch"),
    Mutant(RESULT, experts, "torch.ones_like(weights)", "weights"),
    Mutant(RESULT, experts, "x * weights, ", "x, "),
    Mutant(EMPTY, experts, "if not hidden_states.numel():", "if False:"),
    Mutant(EMPTY, rotary, "if not query.numel():", "if False:"),
    Mutant(EMPTY, activation, "x.shape[-1] // 2", "x.shape[-1]"),
    Mutant(
        EMPTY,
        normalization,
        "return empty if residual is None else (empty, x.new_empty(x.shape))",
        "return empty",
    ),
    Mutant(HALVES, merging, "(prefix_lse, suffix_lse)\n    )", "(suffix_lse, prefix_lse)\n    )"),
    Mutant(HALVES, merging, "outputs, 1)", "outputs, 0)"),
    Mutant(HALVES, merging, "merged, lse = torch", "lse, merged = torch"),
    Mutant(HALVES, merging, "(lse == math.inf, -math.inf)", "(lse == -math.inf, math.inf)"),
    Mutant(LAYOUT, merging, "for lse in (prefix_lse", "for lse in (prefix_lse.T"),
    Mutant(EPSILON, merging, "NOTHING = -1e4", "NOTHING = -5.0"),
    Mutant(EPSILON, merging, "[(lse - most).clamp", "[lse.clamp"),
    Mutant(RESULT, merging, "(lse.view(most.shape) + most)", "lse.view(most.shape)"),
    Mutant(RESULT, merging, ".masked_fill(no_keys, -math.inf)", ""),
    Mutant(RESULT, merging, "most.masked_fill(no_keys, 0.0)", "most"),
    Mutant(EMPTY, merging, "if not prefix_output.numel():", "if False:"),
    Mutant(REFUSAL, merging, "shape[2] % MULTIPLE or not", "not"),
    Mutant(REFUSAL, merging, "lse.dtype != torch.float32 or ", ""),
    Mutant(ROUTING, routing, "norm_type=SCORING[scoring_func]", "norm_type=0"),
    Mutant(ROUTING, routing, '{"softmax": 0, "sigmoid": 1}', '{"softmax": 1, "sigmoid": 0}'),
    Mutant(ROUTING, routing, "group_select_mode=mode", "group_select_mode=0"),
    Mutant(ROUTING, routing, "group_select_mode=mode", "group_select_mode=1"),
    Mutant(ROUTING, routing, "k_group=best", "k_group=count"),
    Mutant(ROUTING, routing, "bias=None if bias is None else bias.float()", "bias=None"),
    Mutant(ROUTING, routing, "if of_softmax and renormalize:", "if False:"),
    Mutant(ROUTING, routing, "if of_softmax and renormalize:", "if of_softmax:"),
    Mutant(ROUTING, routing, "factor=1.0 if of_softmax else factor", "factor=1.0"),
    Mutant(ROUTING, routing, "factor=1.0 if of_softmax else factor", "factor=factor"),
    Mutant(RESULT, routing, "logits = gating_output.float()", "logits = gating_output"),
    Mutant(RESULT, routing, "weights, ids, _scores =", "_scores, ids, weights ="),
    Mutant(EMPTY, routing, "if not logits.numel():", "if False:"),
    Mutant(REFUSAL, routing, 'if scoring_func == "sigmoid" and not renormalize:', "if False:"),
    Mutant(REFUSAL, routing, "experts < 3 * groups", "experts < groups"),
    Mutant(REFUSAL, routing, "* 32 * groups > MOST_EXPERTS", "* groups > MOST_EXPERTS"),
    Mutant(REFUSAL, activation, "if x.shape[-1] % 2:", "if False:"),
    Mutant(REFUSAL, activation, "if x.shape[-1] % 2:", "if x.shape[-1] % 16:"),
    Mutant(REFUSAL, experts, "if expert_map is not None:", "if False:"),
    Mutant(REFUSAL, experts, "if w13_bias is not None or w2_bias is not None:", "if False:"),
    Mutant(REFUSAL, normalization, "if epsilon < 0:", "if False:"),
    Mutant(
        REFUSAL,
        normalization,
        "    if variance_size is not None:",
        "    if False:",
    ),
    Mutant(REFUSAL, normalization, ' or mixed("weight", weight, "x", x)', ""),
    Mutant(REFUSAL, normalization, ' or mixed("residual", residual, "x", x)', ""),
    Mutant(REFUSAL, rotary, 'or mixed("cos", cos, "query", query)', ""),
    Mutant(REFUSAL, rotary, 'or mixed("key", key, "query", query)', ""),
    Mutant(REFUSAL, shared, "if x.dtype != y.dtype:", "if True:"),
    Mutant(REFUSAL, shared, "if x.dtype != y.dtype:", "if False:"),
    Mutant(REFUSAL, shared, "None if x.device == y.device else", "None if False else"),
    Mutant(REFUSAL, rotary, "if features % step or", "if"),
    Mutant(REFUSAL, rotary, "MULTIPLE = 64", "MULTIPLE = 4"),
    Mutant(REFUSAL, rotary, "MULTIPLE = 64", "MULTIPLE = 128"),
    Mutant(REFUSAL, rotary, "joint_cos_sin(cos, sin) is not None", "True"),
    Mutant(REFUSAL, shared, "if x.dtype not in DTYPES:", "if x.dtype in DTYPES:"),
    Mutant(
        REFUSAL,
        shared,
        "if not 1 <= x.ndim <= MAX_DIMENSIONS:",
        "if not 3 <= x.ndim <= MAX_DIMENSIONS:",
    ),
]


@pytest.fixture(autouse=True)
def _uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant's calls are none of the package's."""
    monkeypatch.delenv("EMULATED_NPU_CALLS", raising=False)


def test_without_a_mistake_nothing_fails() -> None:
    assert failing(None) is None


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mistake_is_seen(mutant: Mutant) -> None:
    assert failing(mutant) is not None


def failing(mutant: Mutant | None) -> str | None:
    """What the checks say first of the ops with this mistake; None if they see none."""
    common = made_anew(shared, mutant, DEVICE=shared.DEVICE)
    impls: dict[str, OpImpl] = {}
    for module in MODULES:
        if mutant is not None and mutant.module not in (shared, module):
            continue
        made = made_anew(module, mutant, mixed=common.mixed, unsuitable=common.unsuitable)
        for op, impl in IMPLS.items():
            if impl.fn.__module__ == module.__name__:
                supports = getattr(made, f"supports_{op}")
                impls[op] = dataclasses.replace(impl, fn=getattr(made, op), supports=supports)
    try:
        for mistake in (*unseen(impls), *one_row(impls)):
            return mistake
        for op in impls:
            for dtype in DTYPES:
                for mistake in mistakes(impls, op, dtype):
                    return mistake
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    for impl in impls.values():
        for failure in failures(impl, torch.device("cpu"), without=SLOW):
            return str(failure)
    return None
