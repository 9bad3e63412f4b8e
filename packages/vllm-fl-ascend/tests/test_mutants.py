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
from vllm_fl_ascend.impl import activation, multimodal_rotary, normalization, rotary

MODULES = (activation, multimodal_rotary, normalization, rotary)
SLOW = ("fork", "spawn", "engine", "tracing", "opcheck")
"""Checks that no mistake of these is for."""

KEYWORD, HALVES, LAYOUT, EPSILON = "keyword", "halves", "layout", "epsilon"
RESIDUAL, RESULT, EMPTY, REFUSAL = "residual", "result", "empty", "refusal"

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
    Mutant(HALVES, activation, "out, _gelu = torch", "_gelu, out = torch"),
    Mutant(
        HALVES,
        rotary,
        "joint_cos_sin(cos, sin),",
        "torch.cat((sin, cos), -1),",
    ),
    Mutant(HALVES, multimodal_rotary, "joint_cos_sin(cos, sin),", "torch.cat((sin, cos), -1),"),
    Mutant(HALVES, multimodal_rotary, '"interleave" if rotary_interleaved else "half"', '"half"'),
    Mutant(KEYWORD, multimodal_rotary, "mrope_section=list(mrope_section)", "mrope_section=[]"),
    Mutant(HALVES, multimodal_rotary, "list(mrope_section)", "list(mrope_section)[::-1]"),
    Mutant(LAYOUT, multimodal_rotary, "position_ids.t()", "position_ids"),
    Mutant(LAYOUT, multimodal_rotary, "position_ids.t()", "position_ids.t().flip(0)"),
    Mutant(LAYOUT, multimodal_rotary, "key.flatten(1),", "key.flip(1).flatten(1),"),
    Mutant(EMPTY, multimodal_rotary, "if not query.numel():", "if False:"),
    Mutant(REFUSAL, multimodal_rotary, "    if mrope_interleaved:", "    if False:"),
    Mutant(HALVES, rotary, "if rotary_interleaved else", "if not rotary_interleaved else"),
    Mutant(HALVES, rotary, '"interleave" if rotary_interleaved else "half"', '"half"'),
    Mutant(HALVES, rotary, '"interleave" if rotary_interleaved else "half"', '"interleave"'),
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
        "return normed.view(x.shape)\n",
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
    Mutant(RESIDUAL, normalization, "total.view(x.shape)", "residual"),
    Mutant(RESIDUAL, normalization, "total.view(x.shape)", "x"),
    Mutant(RESIDUAL, normalization, "normed.view(x.shape), total", "total.view(x.shape), normed"),
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
        "return normed.view(x.shape), total",
        "return normed.view(x.shape), residual.copy_(total.view(x.shape)), total",
    ),
    Mutant(
        RESIDUAL,
        normalization,
        "return normed.view(x.shape), total.view(x.shape)",
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
    Mutant(EMPTY, rotary, "if not query.numel():", "if False:"),
    Mutant(EMPTY, activation, "x.shape[-1] // 2", "x.shape[-1]"),
    Mutant(
        EMPTY,
        normalization,
        "return empty if residual is None else (empty, x.new_empty(x.shape))",
        "return empty",
    ),
    Mutant(REFUSAL, activation, "if x.shape[-1] % 2:", "if False:"),
    Mutant(REFUSAL, activation, "if x.shape[-1] % 2:", "if x.shape[-1] % 16:"),
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
    Mutant(REFUSAL, shared, "if x is None or x.dtype == y.dtype:", "if x is None:"),
    Mutant(REFUSAL, shared, "if x is None or x.dtype == y.dtype:", "if x is not None:"),
    Mutant(REFUSAL, rotary, "if features % step:", "if False:"),
    Mutant(REFUSAL, rotary, "MULTIPLE = 64", "MULTIPLE = 4"),
    Mutant(REFUSAL, rotary, "MULTIPLE = 64", "MULTIPLE = 128"),
    Mutant(REFUSAL, rotary, "if joint_cos_sin(cos, sin) is None:", "if False:"),
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
