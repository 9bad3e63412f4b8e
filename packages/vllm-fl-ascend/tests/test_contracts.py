"""The calls that the kernels get: every sample of a contract, except those listed here."""

from __future__ import annotations

import emulated
import pytest
import torch
from anywhere import on_cpu

from vllm_fl.plugins.registry import known_contracts
from vllm_fl_ascend.impl import activation, normalization, rotary
from vllm_fl_ascend.plugin import register_ops
from vllm_fl_verify.verification import compare

IMPLS = on_cpu(register_ops())
CPU = torch.device("cpu")
DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

BFLOAT16_ALONE = {"fused_experts"}
"""Ops with an operator documented by torch_npu for this dtype only."""

REFUSED = {
    "merge_attn_states": {"head_size % 8": ["odd sizes"]},
    "fused_experts": {
        "expert_map is None": ["experts of other ranks", "padding, experts of other ranks"],
        "w13_bias is None": [
            *("weights on the input, biases", "biases"),
            *("gelu, gates near -3", "gelu_tanh, gates near -3"),
        ],
    },
    "multimodal_rotary_embedding": {
        "not mrope_interleaved": [
            *("interleaved axes", "interleaved axes, width ends first"),
            "interleaved axes and pairs",
        ],
        "not the two halves of one cache": ["contiguous, cos and sin apart"],
        "cos.dtype == query.dtype": ["fp32 tables"],
        "min(mrope_section)": ["heights and widths alone", "odd sizes, an axis without pairs"],
    },
    "rms_norm": {
        "variance_size is None": ["variance_size", "variance_size, residual"],
        "weight.dtype == x.dtype": [
            *("fp32 weight", "fp32 weight, residual"),
            *("fp32 weight, 300 rows", "fp32 weight, 300 rows, residual"),
        ],
    },
    "rotary_embedding": {
        "not the two halves of one cache": ["cos and sin are separate tensors"],
        "cos.dtype == query.dtype": ["fp32 tables"],
        "head_size * query.itemsize": [
            *("odd sizes", "odd sizes, interleaved", "odd head_size", "1 pair")
        ],
    },
    "quant_int8": {
        "scale is None": [
            *("static", "static, saturating on both sides", "static, beyond 32767 steps"),
            *("static, azp", "static, 0 tokens"),
        ],
        "asymmetric is None": [
            *("asymmetric", "asymmetric, all above 0, every other row"),
            "asymmetric, rows of equal numbers",
        ],
    },
    "moe_topk": {"or renormalize": ["sigmoid with bias, plain", "one expert, plain"]},
    "grouped_topk": {
        "or renormalize": ["one expert, plain", "every group, plain", "bias, plain, scaled"],
        "experts >= 3": ["groups of two"],
        "<= 2048": ["many small groups"],
    },
}
"""Calls that torch_npu's kernels do not support: op -> a part of the reason -> samples."""

REFUSED_IN_FP32 = {"quant_int8": "x.dtype != torch.float32"}
"""Ops with a kernel without fp32 support, and a part of the reason."""


def mistakes(op: str, dtype: torch.dtype) -> list[str]:
    """The samples of an op with an unexpected outcome."""
    found = []
    for sample in known_contracts().contracts[op].samples(dtype, CPU):
        reasons = REFUSED.get(op, {}).items()
        reason = next((why for why, names in reasons if sample.name in names), None)
        if dtype is torch.float32 and "fp32" in sample.name:
            reason = None  # no mixture of dtypes
        if dtype is torch.float32:
            reason = REFUSED_IN_FP32.get(op, reason)
        if op in BFLOAT16_ALONE and dtype is not torch.bfloat16:
            reason = "== torch.bfloat16"
        result = compare(IMPLS[op], known_contracts().contracts[op], sample, dtype)
        as_wanted = result.status == ("refused" if reason else "ok")
        if not as_wanted or (reason and reason not in (result.reason or "")):
            found.append(f"{sample.name}: {result.status} {result.reason}")
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.get)
@pytest.mark.parametrize("op", sorted(IMPLS))
def test_samples_are_right_or_refused(op: str, dtype: torch.dtype) -> None:
    assert mistakes(op, dtype) == []


UNSUITABLE = [
    ("silu_and_mul", (torch.ones([1] * 8 + [2]),), "x.ndim <= 8"),
    ("quick_gelu", (torch.tensor(1.0),), "1 <= x.ndim"),
    ("moe_topk", (torch.ones(2, 2), 1, True), "experts=2"),
    ("grouped_topk", (torch.ones(2, 2048), 2, True, 128, 4), "experts=2048"),
]
"""Calls that no kernel supports, with a part of the reason."""


@pytest.mark.parametrize(("op", "args", "reason"), UNSUITABLE)
def test_what_no_kernel_takes_is_refused_with_its_reason(
    op: str, args: tuple[object, ...], reason: str
) -> None:
    assert reason in str(IMPLS[op].supports(*args))


def test_a_row_of_one_dimension_is_normed() -> None:
    """The kernels do not support one dimension."""
    norm = IMPLS["rms_norm"].fn
    x, weight = torch.randn(32), torch.randn(32)
    wanted = norm(x[None], x[None], weight, 1e-6)
    for found, row in zip(norm(x, x, weight, 1e-6), wanted, strict=True):
        assert torch.equal(found, row[0])
    assert norm(x, None, weight, 1e-6).shape == x.shape


def test_one_kernel_does_one_call() -> None:
    """Apart from the one launch no tensor is copied, converted or normed."""
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
        for sample in known_contracts().contracts[op].samples(torch.bfloat16, CPU):
            if sample.name.startswith("0 token"):
                impl.fn(*sample.args)
    assert emulated.counted() == before
