"""What the kernels are given: every sample of a contract, but for those named here."""

from __future__ import annotations

import emulated
import pytest
import torch

from vllm_fl.contracts import contracts
from vllm_fl_ascend.impl import activation, normalization, rotary
from vllm_fl_ascend.plugin import register_ops
from vllm_fl_verify.verification import compare

IMPLS = {impl.op_name: impl for impl in register_ops()}
CPU = torch.device("cpu")
DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

BFLOAT16_ALONE = {"fused_experts"}
"""Ops with an operator that torch_npu's documentation has no other dtype of."""

REFUSED = {
    "merge_attn_states": {"odd sizes": "head_size 33 is no multiple"},
    "fused_experts": {
        "experts of other ranks": "expert_map",
        "padding, experts of other ranks": "expert_map",
        "weights on the input, biases": "biases are not added",
        "biases": "biases are not added",
        "gelu, gates near -3": "biases are not added",
        "gelu_tanh, gates near -3": "biases are not added",
    },
    "multimodal_rotary_embedding": {
        "axes take turns": "in sections, not in turns",
        "axes take turns, width ends first": "in sections, not in turns",
        "both take turns": "in sections, not in turns",
        "contiguous, cos and sin apart": "not the two halves of one cache",
        "fp32 tables": "cos is torch.float32",
        "heights and widths alone": "are no three parts of 32 pairs",
        "odd sizes, an axis without pairs": "are no three parts of 19 pairs",
    },
    "rms_norm": {
        "variance_size": "variance_size",
        "variance_size, residual": "variance_size",
        "fp32 weight": "weight is torch.float32",
        "fp32 weight, residual": "weight is torch.float32",
        "fp32 weight, 300 rows": "weight is torch.float32",
        "fp32 weight, 300 rows, residual": "weight is torch.float32",
    },
    "rotary_embedding": {
        "cos and sin are separate tensors": "not the two halves of one cache",
        "fp32 tables": "cos is torch.float32",
        "odd sizes": "head_size 70 is no multiple",
        "odd sizes, interleaved": "head_size 70 is no multiple",
        "odd head_size": "head_size 7 is no multiple",
        "1 pair": "head_size 2 is no multiple",
    },
    "quant_int8": {
        "static": "a given scale",
        "static, saturating on both sides": "a given scale",
        "static, azp": "a given scale",
        "static, 0 tokens": "a given scale",
        "asymmetric": "zero points",
        "asymmetric, all above 0, every other row": "zero points",
        "asymmetric, rows of equal numbers": "zero points",
    },
    "moe_topk": {
        "sigmoid with bias, plain": "always renormalises",
        "one expert, plain": "always renormalises",
    },
    "grouped_topk": {
        "one expert, plain": "always renormalises",
        "every group, plain": "always renormalises",
        "bias, plain, scaled": "always renormalises",
        "groups of two": "16 experts in 8 groups",
        "many small groups": "as many as 195 experts",
    },
}
"""What torch_npu's kernels have no form for: op -> sample -> a part of the reason."""

REFUSED_IN_FP32 = {"quant_int8": "takes float16 and bfloat16"}
"""Ops whose kernel takes no fp32, with a part of the reason."""


def mistakes(op: str, dtype: torch.dtype) -> list[str]:
    """The samples of an op that come out otherwise than they should."""
    found = []
    for sample in contracts()[op].samples(dtype, CPU):
        reason = REFUSED.get(op, {}).get(sample.name)
        if dtype is torch.float32 and "fp32" in sample.name:
            reason = None  # no mixture of dtypes
        if dtype is torch.float32:
            reason = REFUSED_IN_FP32.get(op, reason)
        if op in BFLOAT16_ALONE and dtype is not torch.bfloat16:
            reason = "takes bfloat16 alone"
        result = compare(IMPLS[op], contracts()[op], sample, dtype)
        as_wanted = result.status == ("refused" if reason else "ok")
        if not as_wanted or (reason and reason not in (result.reason or "")):
            found.append(f"{sample.name}: {result.status} {result.reason}")
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.get)
@pytest.mark.parametrize("op", sorted(IMPLS))
def test_samples_are_right_or_refused(op: str, dtype: torch.dtype) -> None:
    assert mistakes(op, dtype) == []


X, ROWS = torch.ones(2, 16), torch.ones(2, 3, 16)
SUMS, WIDE = torch.ones(2, 3), torch.ones(2, 3, 520)
TABLES = (torch.ones(4, 8), torch.ones(4, 8), torch.arange(2))
AXES = (*TABLES[:2], torch.zeros(2, 3, dtype=torch.int64))
UNSUITABLE = [
    ("silu_and_mul", (torch.ones(2, 3),), "no two halves"),
    ("silu_and_mul", (torch.ones([1] * 8 + [2]),), "of 9 dimensions"),
    ("silu_and_mul_with_clamp", (X, -7.0), "limit=-7.0 is not finite and above 0"),
    ("quick_gelu", (torch.tensor(1.0),), "of 0 dimensions"),
    ("multimodal_rotary_embedding", (ROWS, ROWS, *AXES, [4, 4, 0], True), "not in turns"),
    ("multimodal_rotary_embedding", (ROWS, ROWS, *AXES, [4, 4, 4]), "no three parts of 8"),
    ("multimodal_rotary_embedding", (ROWS, ROWS, *TABLES, [4, 4, 0]), "position_ids is"),
    ("multimodal_rotary_embedding", (ROWS, ROWS.half(), *AXES, [4, 2, 2]), "key is torch.float16"),
    ("moe_topk", (X.long(), 2, True), "gating_output of torch.int64"),
    ("moe_topk", (X[:, :2], 1, True), "2 experts in 1 groups"),
    ("moe_topk", (X, 2, False, "sigmoid"), "always renormalises"),
    ("moe_topk", (X, 2, True, "softmax", float("inf")), "not finite"),
    ("grouped_topk", (torch.ones(2, 2048), 2, True, 128, 4), "as many as 2048 experts"),
    ("quant_int8", (X,), "takes float16 and bfloat16"),
    ("quant_int8", (X.half()[None],), "not (tokens, hidden)"),
    ("quant_int8", (X.half(), None, X[0, :1].int()), "a given scale"),
    ("rms_norm", (X, None, None, 1e-6, 8), "variance_size"),
    ("rms_norm", (X, X.half(), None, 1e-6), "residual is torch.float16"),
    ("rms_norm_gated", (X, X.half(), X[0], 1e-6), "z is torch.float16"),
    ("rms_norm_gated", (X, X[:1], X[0], 1e-6), "z is (1, 16)"),
    ("rms_norm_gated", (X, X, X[0, :8], 1e-6), "weight is (8,)"),
    ("rms_norm_gated", (X, X, X[0], 0.0), "not above 0"),
    ("rms_norm_gated", (X, X, X[0], 1e-6, 3), "do not divide"),
    ("rms_norm_gated", (X, X, X[0], 1e-6, 8, True, "gelu"), "no gate of 'gelu'"),
    ("rotary_embedding", (ROWS, ROWS.half(), *TABLES), "key is torch.float16"),
    ("merge_attn_states", (ROWS, SUMS, ROWS.half(), SUMS), "suffix_output is torch.float16"),
    ("merge_attn_states", (ROWS, SUMS, ROWS[:1], SUMS), "outputs of (2, 3, 16) and (1, 3, 16)"),
    ("merge_attn_states", (ROWS, SUMS.T, ROWS, SUMS), "prefix_lse is torch.float32 (3, 2)"),
    ("merge_attn_states", (ROWS, SUMS, ROWS, SUMS.half()), "suffix_lse is torch.float16"),
    ("merge_attn_states", (WIDE, SUMS, WIDE, SUMS), "head_size 520 is no multiple of 8 up to 512"),
    ("rotary_embedding", (ROWS, None, *TABLES), "not the two halves of one cache"),
]
"""Calls that no kernel takes, with a part of the reason."""


@pytest.mark.parametrize(("op", "args", "reason"), UNSUITABLE)
def test_what_no_kernel_takes_is_refused_with_its_reason(
    op: str, args: tuple[object, ...], reason: str
) -> None:
    supports = IMPLS[op].supports
    assert supports is not None
    verdict = supports(*args)
    assert verdict is not True and reason in verdict


def test_a_row_of_one_dimension_is_normed() -> None:
    """The kernels do not take one as it is."""
    norm = IMPLS["rms_norm"].fn
    x, weight = torch.randn(32), torch.randn(32)
    wanted = norm(x[None], x[None], weight, 1e-6)
    for found, row in zip(norm(x, x, weight, 1e-6), wanted, strict=True):
        assert torch.equal(found, row[0])
    assert norm(x, None, weight, 1e-6).shape == x.shape


def test_one_kernel_does_one_call() -> None:
    """No tensor is copied, converted or normed beside the one launch."""
    x = torch.randn(4, 128)
    cos, sin = torch.randn(8, 64).chunk(2, dim=-1)
    heads = torch.randn(4, 3, 64)
    calls = {
        "npu_swiglu": lambda: activation.silu_and_mul(x),
        "npu_geglu": lambda: activation.gelu_and_mul(x),
        "npu_clipped_swiglu": lambda: activation.silu_and_mul_with_clamp(x, 7.0),
        "npu_fast_gelu": lambda: activation.quick_gelu(x),
        "npu_rms_norm": lambda: normalization.rms_norm(x, None, torch.ones(128), 1e-6),
        "npu_add_rms_norm": lambda: normalization.rms_norm(x, x, torch.ones(128), 1e-6),
        "npu_mrope": lambda: rotary.rotary_embedding(heads, heads, cos, sin, torch.arange(4)),
    }
    for name, call in calls.items():
        before = emulated.counted()
        call()
        assert emulated.counted() - before == {name: 1}


def test_no_kernel_is_launched_for_no_tokens() -> None:
    before = emulated.counted()
    for op, impl in IMPLS.items():
        for sample in contracts()[op].samples(torch.bfloat16, CPU):
            if sample.name.startswith("0 token"):
                impl.fn(*sample.args)
    assert emulated.counted() == before
