"""What the ops refuse, and that they refuse nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_fl.contracts import contracts
from vllm_fl_flaggems import loading
from vllm_fl_flaggems.plugin import register_ops

REFUSED = {
    "concat_and_cache_mla": {"odd sizes"},
    "fused_experts": {
        "gelu, gates near -3",
        "gelu_tanh, gates near -3",
        "beyond the limit of swigluoai",
    },
    "recurrent_gated_delta_rule": {"large epsilon"},
    "reshape_and_cache": {
        "heads before slots, keys beside values",
        "heads before slots, the first token skipped",
    },
    "rms_norm": {
        "weight=None",
        "weight=None, residual",
        "variance_size",
        "variance_size, residual",
    },
    "moe_sum": {"places without an expert", "experts elsewhere", "strided ids"},
    "moe_topk": {
        "sigmoid",
        "sigmoid with bias, scaled",
        "sigmoid with bias, plain",
        "softmax with bias, scaled",
    },
    "grouped_topk": {
        "1 token",
        "16 tokens",
        "0 tokens",
        "odd sizes, plain",
        "every group, plain",
        "every other row of a slice",  # so far: without a bias
        "one group",  # 6 experts of a token
    },
}
"""What FlagGems has no kernel for."""

HALVES_ALONE = {"fused_experts"}
"""Ops whose kernels multiply float32 in TF32."""


@pytest.mark.parametrize("impl", register_ops(), ids=lambda impl: impl.op_name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_what_has_no_kernel_is_refused_and_nothing_else(
    impl, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_outcome", [SimpleNamespace(device="cpu")])
    samples = list(contracts()[impl.op_name].samples(dtype, torch.device("cpu")))
    refused = {s.name for s in samples if impl.supports(*s.args) is not True}
    if dtype == torch.float32 and impl.op_name in HALVES_ALONE:
        assert refused == {sample.name for sample in samples}
    else:
        assert refused == REFUSED.get(impl.op_name, set())


def test_heads_are_refused_beyond_one_program_and_where_cuda_launches_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (impl,) = (impl for impl in register_ops() if impl.op_name == "qk_norm_rope")

    def verdict(size: int, device: str = "cpu") -> object:
        monkeypatch.setattr(loading, "_outcome", [SimpleNamespace(device=device)])
        qkv, weight = torch.ones(2, 3 * size, device=device), torch.ones(size, device=device)
        table = torch.ones(4, 2, device=device)
        at = torch.arange(2, device=device)
        return impl.supports(qkv, weight, weight, table, at, 1, 1, 1e-6)

    assert verdict(1024) is True
    assert "not of 1025" in str(verdict(1025)) and "not of 1" in str(verdict(1))
    assert "through CUDA" in str(verdict(64, "meta"))
